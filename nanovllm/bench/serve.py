"""How a running server answers under load: any server that speaks OpenAI's API.

There are two ways to put load on a server, and they answer different questions. In a closed loop (--max-concurrency N)
N users wait for their answer before they ask again: a slow server is asked less often, so the load adapts to it. That
measures the most it can do with N at a time. In an open loop (--request-rate R) requests arrive when they arrive, as
those of many strangers do, whether or not the earlier ones are done: a server that is too slow builds a queue, and
every second it falls behind shows in the latencies. That measures what users will see.

The mistake to avoid is called coordinated omission: a client that holds a request back because the server is busy, and
starts its clock only when it sends it, leaves out just the waiting that the slowness caused. A stall of ten seconds is
then one bad request instead of the hundred that would have arrived meanwhile. So here the clock of a request that was
due at some time starts at that time, whatever held it back (--max-concurrency together with a rate, or a client that
is itself too slow: the send delay says how much). Only where nothing says when a request is due does it start with the
sending. The connection is opened for each request anew, and counts. What fails is counted by kind, never tried again.

Prompts are token ids (words, with --text-prompts or in a chat). A recorded trace is replayed with --trace, with its
own arrivals, lengths and, where it has them, shared prefixes; 'inf' for --trace-speedup drops the arrivals.

  TTFT                  until the first piece of the answer that shows something
  TPOT                  from there to the last one, over the tokens after the first: one number a request
  ITL                   between one piece and the next: one number a piece, so that stalls are seen
  E2EL                  until the last piece
  Request goodput       requests that kept to all the limits of --goodput, a second
  P99 send delay        how late requests were sent; 0 in a closed loop
"""

import argparse
import json
import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import __version__
from nanovllm.bench.arguments import count, json_object, number, positive, whole_number
from nanovllm.errors import ConfigError, NanoError

if TYPE_CHECKING:
    from nanovllm.bench.http_stream import Server
    from nanovllm.bench.load import Outcome, Target
    from nanovllm.bench.report import Report
    from nanovllm.bench.traces import Request

DATASETS = ("random", "published", "custom")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_RANDOM, NUM_PUBLISHED = 1000, 256
PUBLISHED_TEMPERATURE = 0.6
SECONDS_BETWEEN_LOOKS = 0.25  # while the server is not ready


# --- arguments --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("the server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s")
    server.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    server.add_argument("--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS, help="default: %(default)s")
    server.add_argument("--api-key", metavar="KEY")
    server.add_argument("--ready-timeout", type=positive, metavar="SECONDS", help="wait this long for the server")
    server.add_argument(
        "--request-timeout", type=positive, default=3600.0, metavar="SECONDS", help="default: %(default)g"
    )

    load = parser.add_argument_group("the load")
    load.add_argument(
        "--request-rate", type=positive, metavar="R", help="open loop: requests a second; default: inf, all at once"
    )
    load.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of the gaps: 1 is a Poisson process, less has bursts; default: 1",
    )
    load.add_argument("--max-concurrency", type=count, metavar="N", help="closed loop: at most N requests at a time")

    requests = parser.add_argument_group("the requests")
    requests.add_argument("--dataset-name", choices=DATASETS, help="default: random; published: see bench throughput")
    requests.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help='custom: a JSON object a line with "prompt" or "messages", and "output_tokens" if need be',
    )
    requests.add_argument(
        "--num-prompts",
        type=count,
        metavar="N",
        help=f"default: {NUM_RANDOM}; published {NUM_PUBLISHED}, custom: the whole file",
    )
    requests.add_argument("--random-input-len", type=count, default=1024, metavar="N", help="default: %(default)s")
    requests.add_argument("--random-output-len", type=count, default=128, metavar="N", help="default: %(default)s")
    requests.add_argument(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        metavar="X",
        help="lengths are drawn from (1 - X) to (1 + X) times those; default: 0",
    )
    requests.add_argument("--custom-output-len", type=count, default=256, metavar="N", help="default: %(default)s")
    requests.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay Azure's (.csv) or Mooncake's (.jsonl) trace"
    )
    requests.add_argument("--trace-speedup", type=positive, default=1.0, metavar="X", help="default: 1; inf: at once")
    requests.add_argument("--trace-limit", type=count, metavar="N", help="only the first N requests of the trace")
    requests.add_argument("--seed", type=whole_number, default=0, metavar="N", help="default: %(default)s")
    requests.add_argument("--vocab-size", type=count, metavar="N", help="token ids are below it; default: 10,001")
    requests.add_argument("--text-prompts", action="store_true", help="send words instead of token ids")
    requests.add_argument(
        "--temperature", type=not_negative, metavar="X", help=f"default: 0; published: {PUBLISHED_TEMPERATURE}"
    )
    requests.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="every answer has its full length; a server that does not know the field may refuse it; default: on",
    )
    requests.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields to send")

    output = parser.add_argument_group("the output")
    output.add_argument(
        "--goodput",
        type=limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count the requests that keep to all of these, such as ttft:200 tpot:50 e2el:5000",
    )
    output.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG: latencies over time and as CDFs")


def not_negative(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0")
    return value


def ratio(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0 and below 1")
    return value


def limit(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{text!r}: write ttft:MS, tpot:MS or e2el:MS")
    return name, positive(milliseconds)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> "Report":
    import asyncio

    from nanovllm.bench.http_stream import parse_server
    from nanovllm.bench.plot import draw
    from nanovllm.bench.serve_metrics import ServeReport, measure

    requests = choose_requests(args)
    server = parse_server(args.base_url, args.api_key)
    _allow_many_connections()
    target, outcomes = asyncio.run(_load(args, server, requests))
    row = measure(outcomes, dict(args.goodput))
    if not row["completed"]:
        raise NanoError("no request succeeded: " + "; ".join(row["failure_examples"].values()))
    if args.plot is not None:
        args.plot.write_text(draw(outcomes, f"{target.model}, {_load_in_words(args)}"), encoding="utf-8")
    return ServeReport("serve", _environment(target), _settings(args, requests), [row])


def choose_requests(args: argparse.Namespace) -> "list[Request]":
    """What the arguments ask for, with its arrival times."""
    from nanovllm.bench import traces

    _check_combination(args)
    if args.trace is not None:
        return traces.trace_requests(
            args.trace,
            speedup=args.trace_speedup,
            limit=args.trace_limit,
            seed=args.seed,
            vocab_size=args.vocab_size,
        )
    if args.dataset_name == "custom":
        requests = traces.file_requests(
            args.dataset_path,
            output_len=args.custom_output_len,
            is_chat=args.endpoint == CHAT,
            count=args.num_prompts,
        )
    elif args.dataset_name == "published":
        requests = traces.published_requests(
            count=args.num_prompts or NUM_PUBLISHED, seed=args.seed, vocab_size=args.vocab_size
        )
    else:
        requests = traces.random_requests(
            count=args.num_prompts or NUM_RANDOM,
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
            seed=args.seed,
            vocab_size=args.vocab_size,
        )
    rate = args.request_rate or math.inf
    if math.isinf(rate):
        return requests
    times = traces.arrivals(len(requests), rate=rate, burstiness=args.burstiness, seed=args.seed)
    return traces.scheduled(requests, times)


def _check_combination(args: argparse.Namespace) -> None:
    if args.trace is not None:
        for name, instead in {
            "request_rate": "its arrivals are its own; --trace-speedup changes them",
            "num_prompts": "--trace-limit is its number of requests",
            "dataset_name": "it brings its own requests",
            "dataset_path": "it brings its own requests",
        }.items():
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} cannot be used with --trace: {instead}")
    elif args.trace_limit is not None or args.trace_speedup != 1:
        raise ConfigError("--trace-limit and --trace-speedup need --trace FILE")
    if (args.dataset_name == "custom") != (args.dataset_path is not None):
        raise ConfigError("--dataset-name custom and --dataset-path FILE go together")
    if args.dataset_name == "custom" and args.text_prompts:
        raise ConfigError("--text-prompts cannot be used with --dataset-name custom: its prompts are sent as they are")
    if args.plot is not None and not args.plot.resolve().parent.is_dir():
        raise ConfigError(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    if args.burstiness != 1 and math.isinf(args.request_rate or math.inf):
        raise ConfigError("--burstiness needs --request-rate: without it there are no gaps to draw")


async def _load(
    args: argparse.Namespace, server: "Server", requests: "list[Request]"
) -> "tuple[Target, list[Outcome]]":
    from tqdm import tqdm

    from nanovllm.bench.load import Target, drive

    model = args.model
    if model is None or args.ready_timeout is not None:
        listed = await _first_model(server, args.ready_timeout)
        model = model or listed
    usual_temperature = PUBLISHED_TEMPERATURE if args.dataset_name == "published" else 0.0
    target = Target(
        server=server,
        model=model,
        endpoint=args.endpoint,
        temperature=usual_temperature if args.temperature is None else args.temperature,
        ignore_eos=args.ignore_eos,
        as_text=args.text_prompts,
        extra_body=args.extra_body,
        timeout=args.request_timeout,
    )
    with tqdm(total=len(requests), unit="req", disable=None) as bar:  # None: only on a terminal
        outcomes = await drive(
            requests, target, max_concurrency=args.max_concurrency, on_end=lambda outcome: bar.update()
        )
    return target, outcomes


async def _first_model(server: "Server", ready_timeout: float | None) -> str:
    """Of the server's list, once it answers; without a time to wait, it has to at once."""
    import asyncio

    from nanovllm.bench.http_stream import RequestFailed, fetch

    deadline = asyncio.get_running_loop().time() + (ready_timeout or 0.0)
    while True:
        try:
            async with asyncio.timeout(ready_timeout or 30.0):
                body = await fetch(server, "/v1/models")
            return json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise NanoError(f"{server.authority}: its /v1/models lists no model; name one with --model") from None
        except (RequestFailed, TimeoutError) as error:
            if asyncio.get_running_loop().time() > deadline:
                reason = str(error) or "no answer in time"
                raise NanoError(f"the server at {server.authority} is not ready: {reason}") from None
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


def _allow_many_connections() -> None:
    """As many open files as the system lets this process have: a thousand requests at once need as many sockets."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# --- the report -------------------------------------------------------------------------------------------------------


def _environment(target: "Target") -> dict[str, Any]:
    return {
        "model": target.model,
        "server": target.server.authority,
        "endpoint": target.endpoint,
        "nanovllm": __version__,
        "python": platform.python_version(),
    }


def _settings(args: argparse.Namespace, requests: "list[Request]") -> dict[str, Any]:
    return {
        "requests": len(requests),
        "dataset": f"trace {args.trace.name}" if args.trace else args.dataset_name or "random",
        "load": _load_in_words(args),
        "seed": args.seed,
        "ignore_eos": args.ignore_eos,
        **({"goodput": dict(args.goodput)} if args.goodput else {}),
    }


def _load_in_words(args: argparse.Namespace) -> str:
    bound = f"at most {args.max_concurrency} at a time" if args.max_concurrency else ""
    rate = args.request_rate or math.inf
    if args.trace is not None and math.isfinite(args.trace_speedup):
        pace = f"arrivals of the trace, {args.trace_speedup:g} times as fast"
    elif math.isfinite(rate):
        pace = f"{rate:g} requests/s, burstiness {args.burstiness:g}"
    else:
        pace = "" if bound else "all at once"
    return ", ".join(part for part in (pace, bound) if part)
