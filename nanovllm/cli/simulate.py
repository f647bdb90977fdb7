"""`nanovllm simulate`: predicts how a fleet of replicas handles a load, without a device."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count, positive_finite, whole_number
from nanovllm.bench.shapes import shape_folder, shape_names
from nanovllm.cli.options import add_fields, engine_options
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.models.parameters import num_parameters
from nanovllm.option_names import OPTION_ALIASES
from nanovllm.simulate import POLICIES
from nanovllm.simulate.step_time import H200, H200_MEMORY, H200_OVERHEAD
from nanovllm.state import BlockGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanovllm.bench.report import Row
    from nanovllm.cli.parser import Parser
    from nanovllm.models.spec import ModelSpec
    from nanovllm.simulate.requests import Arrival
    from nanovllm.simulate.runs import Limits, Settings
    from nanovllm.simulate.step_time import StepTime

SUMMARY = "predict how replicas handle a load, without a device"
USAGE = "(--trace FILE | --synthetic SPEC) [options]"
DESCRIPTION = """\
Simulate a router with replicas of this engine. The real scheduler and prefix cache run for every request; a formula
gives the time of each step. Prints throughput, latencies, cache hits and how evenly the load was distributed.
"""
EPILOG = """\
examples:
  nanovllm simulate --synthetic groups=256,prefix=2048 --num-requests 2000 --rate 80 --replicas 8 --compare
  nanovllm simulate --trace mooncake.jsonl --replicas 16 --plot fleet.svg
  nanovllm simulate --trace mooncake.jsonl --rate 20 --find --ttft-p99 2 --tpot-p99 0.05

A trace is a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens, or a file with one JSON object per
line: timestamp (milliseconds), input_length, output_length and hash_ids (one number for each block of 512 prompt
tokens; the same number means the same tokens).
"""
DEFAULT_RATE, DEFAULT_NUM_REQUESTS = 10.0, 1000
DEVICE_OPTIONS = ("bandwidth", "tflops", "overhead_ms")
# Options of each simulated engine.
ENGINE_OPTIONS = frozenset(
    {
        *("max_num_batched_tokens", "max_num_seqs", "num_kv_cache_blocks", "kv_cache_block_size"),
        *("enable_prefix_caching", "target_itl_ms"),
    }
)
SHOWN_DEFAULTS = {"num_kv_cache_blocks": "as many as fit into --memory-gib"}
FIND_COLUMNS = (
    *("replicas", "ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms", "requests_per_s", "cache_hit_percent", "busy_percent"),
    "refused",
)


def add_arguments(parser: "Parser") -> None:
    _add_load(parser.add_argument_group("load options"))
    _add_fleet(parser.add_argument_group("fleet options"))
    _add_device(parser.add_argument_group("device and model options"))
    mode = parser.add_argument_group("mode options")
    mode.add_argument("--compare", action="store_true", help="Simulate all policies and print them side by side.")
    mode.add_argument(
        "--find", action="store_true", help="Find the smallest number of replicas that meets the latency limits."
    )
    mode.add_argument(
        "--ttft-p99",
        type=positive_finite,
        metavar="S",
        help="With --find: limit of the p99 time to first token, seconds.",
    )
    mode.add_argument(
        "--tpot-p99",
        type=positive_finite,
        metavar="S",
        help="With --find: limit of the p99 time per output token, seconds.",
    )
    mode.add_argument(
        "--max-replicas", type=count, metavar="N", help="With --find: largest number of replicas to try. Default: 64."
    )
    output = parser.add_argument_group("output options")
    output.add_argument("--plot", type=Path, metavar="FILE", help="Write a plot to this SVG file.")
    output.add_argument("--json", action="store_true", help="Print the result as one JSON document.")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="Recorded trace to replay, CSV or JSON lines (see below)."
    )
    group.add_argument(
        "--synthetic",
        metavar="SPEC",
        help="Random requests in groups that share a prefix: groups=256,prefix=1024,unique=64:256,output=64:192,skew=0 "
        "(these are the defaults). Lengths are tokens; low:high is drawn uniformly. The k-th group gets requests in "
        "proportion to 1/k^skew.",
    )
    group.add_argument(
        "--num-requests",
        type=count,
        metavar="N",
        help="Number of requests. Default: 1000 synthetic requests, or the whole trace.",
    )
    group.add_argument(
        "--rate",
        type=positive_finite,
        metavar="X",
        help="Requests per second. Default: 10 for synthetic requests, the recorded times for a trace.",
    )
    group.add_argument("--seed", type=whole_number, metavar="N", help="Random seed of synthetic requests. Default: 0.")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--replicas", type=count, metavar="N", help="Number of replicas. Default: 1.")
    group.add_argument(
        "--policy",
        choices=POLICIES,
        metavar="NAME",
        help="How the router chooses a replica: prefix (the one with the longest prefix of the prompt in its cache, "
        "unless it is too busy), round-robin, least-loaded, or one-big (one replica with all devices and the whole "
        "cache, as an upper bound). Default: prefix.",
    )
    group.add_argument(
        "--max-lead",
        type=count,
        metavar="N",
        help="Policy prefix: number of open requests by which the replica with the whole prompt cached may exceed "
        "the least loaded one. Default: 8.",
    )
    group.add_argument(
        "--max-ratio",
        type=_ratio,
        metavar="X",
        help="Policy prefix: factor by which it may exceed the least loaded one, if that allows more. Default: 1.5.",
    )
    group.add_argument(
        "--max-model-len",
        type=count,
        metavar="N",
        help="Maximum length of a sequence in tokens; longer requests are refused. Default: the longest request.",
    )
    add_fields(group, Config, ENGINE_OPTIONS, SHOWN_DEFAULTS, aliases=OPTION_ALIASES)


def _add_device(group: argparse._ArgumentGroup) -> None:
    known = ", ".join(shape_names())
    group.add_argument(
        "--model-shape",
        default="qwen3-8b",
        metavar="NAME",
        help=f"Shape of the simulated model. Known: {known}. Default: qwen3-8b.",
    )
    for name, meaning, default in (
        ("--memory-gib", "Memory of a replica's device in GiB", H200_MEMORY / 2**30),
        ("--bandwidth", "Memory bandwidth that the engine reaches, in TB/s", H200.bytes_per_second / 1e12),
        ("--tflops", "Arithmetic rate that the engine reaches, in TFLOP/s", H200.flops_per_second / 1e12),
        ("--overhead-ms", "Time of a step that neither bandwidth nor arithmetic explains, in ms", H200_OVERHEAD * 1e3),
    ):
        help = f"{meaning}. Default: {default:g}, measured on an H200."
        group.add_argument(name, type=positive_finite, metavar="X", help=help)
    group.add_argument(
        "--step-time",
        metavar="A,B,C[,D]",
        help="Constants of a linear formula to use instead, in milliseconds: per step, per prompt token, per decoding "
        "sequence, per context token.",
    )


# --- simulating -------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    try:
        _refuse_contradictions(args)
        arrivals = _arrivals(args)
        settings, described = _settings(args, arrivals)
    except ConfigError as error:
        args.parser.error(str(error))
    described = {**_describe_load(args, arrivals), **described}
    if args.find:
        return _find(args, arrivals, settings, described)
    from nanovllm.simulate.metrics import measure
    from nanovllm.simulate.plot import draw_runs
    from nanovllm.simulate.runs import simulate

    num_replicas = args.replicas or 1
    policies = POLICIES if args.compare else (args.policy or POLICIES[0],)
    outcomes = {
        policy: simulate(arrivals, num_replicas=num_replicas, policy=policy, settings=settings) for policy in policies
    }
    rows = [{"policy": policy, **measure(outcome)} for policy, outcome in outcomes.items()]
    _print(args, {**described, "replicas": num_replicas}, rows, _side_by_side(rows))
    if args.plot is not None:
        args.plot.write_text(draw_runs(outcomes, _caption(args, f"{num_replicas} replicas")), encoding="utf-8")
    return 0


def _find(args: argparse.Namespace, arrivals: "Sequence[Arrival]", settings: "Settings", described: "Row") -> int:
    from nanovllm.bench.report import table
    from nanovllm.simulate.plot import draw_search
    from nanovllm.simulate.runs import fewest_replicas, run_row

    limits, policy = _limits(args), args.policy or POLICIES[0]
    enough, tried = fewest_replicas(
        lambda number: run_row(arrivals, num_replicas=number, policy=policy, settings=settings),
        limits=limits,
        most=args.max_replicas or 64,
    )
    rows = [{**row, "enough": limits.are_kept_by(row)} for row in tried.values()]
    answer = f"{max(tried)} replicas are not enough" if enough is None else f"{enough} replicas are enough"
    shown = [{**{name: row[name] for name in FIND_COLUMNS}, "enough": "yes" if row["enough"] else "no"} for row in rows]
    described |= {"policy": policy, "ttft_p99_s": args.ttft_p99, "tpot_p99_s": args.tpot_p99}
    _print(args, {**described, "enough": enough} if args.json else described, rows, f"{table(shown)}\n\n{answer}")
    if args.plot is not None:
        args.plot.write_text(draw_search(tried, limits, _caption(args, answer)), encoding="utf-8")
    return 1 if enough is None else 0


def _limits(args: argparse.Namespace) -> "Limits":
    from nanovllm.simulate.runs import Limits

    ttft, tpot = (None if limit is None else 1e3 * limit for limit in (args.ttft_p99, args.tpot_p99))
    return Limits(ttft_p99_ms=ttft, tpot_p99_ms=tpot)


def _print(args: argparse.Namespace, described: "Row", rows: "list[Row]", text: str) -> None:
    from nanovllm.bench.report import Report

    if args.json:
        print(Report("simulate", {}, described, rows).to_json())
        return
    width = max(map(len, described))
    known = {name: value for name, value in described.items() if value is not None}
    print("\n".join(f"{name.replace('_', ' '):<{width}}  {_show(value)}" for name, value in known.items()))
    print(f"\n{text}")


def _show(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _side_by_side(rows: "list[Row]") -> str:
    """A table with one line per metric and one column per policy."""
    from nanovllm.bench.report import table

    names = [name for name in rows[0] if name != "policy"]
    return table([{"": _title(name), **{row["policy"]: _dash(row[name]) for row in rows}} for name in names])


def _title(name: str) -> str:
    return name.replace("_per_", "/").replace("_percent", " %").replace("_", " ")


def _dash(value: Any) -> Any:
    return "-" if value is None else value


def _caption(args: argparse.Namespace, answer: str) -> str:
    source = args.trace.name if args.trace is not None else args.synthetic or "synthetic"
    rate = f", {args.rate:g} requests/s" if args.rate is not None else ""
    return f"{args.model_shape}, {source}{rate}: {answer} (simulated)"


# --- from arguments to settings ---------------------------------------------------------------------------------------


def _refuse_contradictions(args: argparse.Namespace) -> None:
    given = {name for name, value in vars(args).items() if value is not None and value is not False}
    if ("trace" in given) == ("synthetic" in given):
        raise ConfigError("give the load either with --trace FILE or with --synthetic SPEC")
    if args.find and not given & {"ttft_p99", "tpot_p99"}:
        raise ConfigError("--find needs a limit: --ttft-p99, --tpot-p99 or both")
    if args.step_time is not None:
        _refuse_together(given, "step_time", DEVICE_OPTIONS)
    if args.find:
        _refuse_together(given, "find", ("compare", "replicas"))
    else:
        _refuse_without(given, "find", ("ttft_p99", "tpot_p99", "max_replicas"))
    if args.compare:
        _refuse_together(given, "compare", ("policy",))
    if (args.policy or "prefix") != "prefix":
        for name in sorted(given & {"max_lead", "max_ratio"}):
            raise ConfigError(f"{_option(name)} applies to the policy prefix, not to {args.policy}")
    _refuse_without(given, "synthetic", ("seed",))
    if args.plot is not None and not args.plot.resolve().parent.is_dir():
        raise ConfigError(f"--plot {args.plot}: there is no folder {args.plot.parent}")


def _refuse_together(given: set[str], name: str, others: tuple[str, ...]) -> None:
    for other in others:
        if other in given:
            raise ConfigError(f"{_option(name)} and {_option(other)} cannot be given together")


def _refuse_without(given: set[str], name: str, others: tuple[str, ...]) -> None:
    for other in others:
        if other in given and name not in given:
            raise ConfigError(f"{_option(other)} works only with {_option(name)}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _arrivals(args: argparse.Namespace) -> "list[Arrival]":
    from nanovllm.simulate.requests import Synthetic, trace_arrivals

    if args.trace is not None:
        return trace_arrivals(args.trace, limit=args.num_requests, rate=args.rate)
    return Synthetic.parse(args.synthetic).arrivals(
        count=args.num_requests or DEFAULT_NUM_REQUESTS, rate=args.rate or DEFAULT_RATE, seed=args.seed or 0
    )


def _settings(args: argparse.Namespace, arrivals: "Sequence[Arrival]") -> "tuple[Settings, Row]":
    """The settings of each replica, and the rows that describe them in the report."""
    from nanovllm.models.registry import describe
    from nanovllm.remote.routing import MAX_LEAD, MAX_RATIO
    from nanovllm.simulate.runs import Settings

    model = describe(shape_folder(args.model_shape)).config
    engine = Config.from_options(None, engine_options(args))
    num_blocks = engine.num_kv_cache_blocks
    if num_blocks == -1:
        num_blocks = _blocks_in_memory(args, model, engine.kv_cache_block_size)
    longest = max(arrival.input_len + arrival.output_len for arrival in arrivals)
    groups = (BlockGroup(num_blocks),)
    config = engine.scheduler_config(max_model_len=args.max_model_len or longest, groups=groups)
    settings = Settings(
        config,
        _step_time(args, model),
        args.max_lead or MAX_LEAD,
        args.max_ratio or MAX_RATIO,
        target_itl_ms=engine.target_itl_ms,
    )
    described: Row = {
        "model": args.model_shape,
        "step_time": args.step_time or f"{_bandwidth(args):g} TB/s, {_tflops(args):g} TFLOP/s, {_overhead(args):g} ms",
        "kv_cache_tokens": num_blocks * config.block_size,
    }
    return settings, described


def _blocks_in_memory(args: argparse.Namespace, model: "ModelSpec", block_size: int) -> int:
    memory = H200_MEMORY if args.memory_gib is None else args.memory_gib * 2**30
    left = Config.gpu_memory_utilization * memory - 2 * num_parameters(model)
    num_blocks = int(left // (sum(group.num_bytes for group in model.state_groups("bfloat16")) * block_size))
    if num_blocks < 1:
        raise ConfigError(
            f"{args.model_shape} does not fit into {memory / 2**30:g} GiB: raise --memory-gib, or, if a replica has "
            "several devices, give --num-kv-cache-blocks for all of them together"
        )
    return num_blocks


def _step_time(args: argparse.Namespace, model: "ModelSpec") -> "StepTime":
    from nanovllm.bench.roofline import Machine, Roofline
    from nanovllm.simulate.step_time import Linear, Modelled

    if args.step_time is not None:
        return Linear.parse(args.step_time)
    machine = Machine(_bandwidth(args) * 1e12, _tflops(args) * 1e12)
    return Modelled(Roofline(machine, model, 2, "bfloat16"), _overhead(args) / 1e3)


def _bandwidth(args: argparse.Namespace) -> float:
    return args.bandwidth or H200.bytes_per_second / 1e12


def _tflops(args: argparse.Namespace) -> float:
    return args.tflops or H200.flops_per_second / 1e12


def _overhead(args: argparse.Namespace) -> float:
    return args.overhead_ms or H200_OVERHEAD * 1e3


def _describe_load(args: argparse.Namespace, arrivals: "Sequence[Arrival]") -> "Row":
    num = len(arrivals)
    return {
        "load": str(args.trace) if args.trace is not None else f"synthetic {args.synthetic}".rstrip(),
        "requests": num,
        "arrivals_seconds": arrivals[-1].seconds,
        "mean_input_tokens": sum(arrival.input_len for arrival in arrivals) / num,
        "mean_output_tokens": sum(arrival.output_len for arrival in arrivals) / num,
    }


def _ratio(text: str) -> float:
    value = positive_finite(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value
