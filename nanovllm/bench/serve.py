"""Throughput and latency of a running server under load; any server with the OpenAI API works.

There are two ways to put load on a server. In a closed loop (--max-concurrency N) each of N users waits for an answer
before sending the next request: a slow server gets fewer requests. That measures the highest throughput with N requests
at a time. In an open loop (--request-rate R) requests arrive independently of the server: if it is too slow, a queue
builds up and the latencies grow. That measures what users will experience.

A client that delays a request because the server is busy, and starts its clock only when it sends it, hides the waiting
that the slow server caused (coordinated omission). A stall of ten seconds is then one slow request instead of the
hundred that would have arrived in that time. So the latency of a request counts from the time at which it was due,
whatever delayed it (--max-concurrency together with a rate, or a client that is too slow; see the send delay). Requests
without a due time count from sending. Each request opens a new connection, which is included. Failed requests are
counted by kind and not retried.

With several rates (--request-rate 8,16,32) each one is measured for itself, with prompts of its own, after the requests
of the one before have ended. The report has a row for each; --plot draws TTFT, ITL and goodput against the rate.

Prompts are token ids (words with --text-prompts or in a chat). --trace replays a recorded trace with its arrival times,
its lengths and, if it has them, its shared prefixes; --trace-speedup inf ignores the arrival times.

  TTFT                  time to the first piece of the answer that has content
  TPOT                  time from the first piece to the last, divided by the tokens after the first; one per request
  ITL                   time between two pieces, one value per piece, which shows stalls. Tokens whose text is not yet
                        complete, such as half a character, are a piece if the server sends one, as vLLM does
  E2EL                  time to the last piece
  Request goodput       requests per second that met all limits of --goodput; the limit of itl applies to a request's
                        longest ITL
  P99 send delay        how much later than due requests were sent; 0 in a closed loop
"""

import argparse
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import __version__
from nanovllm.bench.arguments import count, json_object, number, positive, positive_finite, whole_number
from nanovllm.errors import ConfigError, NanoError

if TYPE_CHECKING:
    from nanovllm.bench.http_stream import Server
    from nanovllm.bench.load import Outcome, Target
    from nanovllm.bench.report import Report, Row
    from nanovllm.bench.traces import Request

GOODPUT_NAMES = ("ttft", "tpot", "itl", "e2el")
DATASETS = ("random", "published", "custom")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_RANDOM, NUM_PUBLISHED = 1000, 256
PUBLISHED_TEMPERATURE = 0.6
SECONDS_BETWEEN_POLLS = 0.25  # while the server is not ready


# --- arguments --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("server options"))
    _add_load(parser.add_argument_group("load options"))
    _add_dataset(parser.add_argument_group("dataset options"))
    _add_request(parser.add_argument_group("request options"))
    output = parser.add_argument_group("output options")
    output.add_argument(
        "--goodput",
        type=limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="Count the requests that meet all of these limits in milliseconds, such as ttft:200 itl:50. Names: "
        f"{', '.join(GOODPUT_NAMES)}.",
    )
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="Draw latencies over time and their distribution into this SVG file; with several request rates, "
        "latencies and goodput against the rate.",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="URL of the server. Default: %(default)s."
    )
    group.add_argument(
        "--model", metavar="NAME", help="Model name to send. Default: the first one that the server lists."
    )
    group.add_argument(
        "--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS, help="API path to call. Default: %(default)s."
    )
    group.add_argument("--api-key", metavar="KEY", help="API key to send.")
    group.add_argument(
        "--ready-timeout",
        type=positive,
        metavar="SECONDS",
        help="Seconds to wait until the server answers. Default: 0.",
    )
    group.add_argument(
        "--request-timeout",
        type=positive,
        default=3600.0,
        metavar="SECONDS",
        help="Seconds after which a request counts as failed. Default: %(default)g.",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=rates,
        metavar="R[,R...]",
        help="Open loop: requests per second. Several rates are measured one after the other. Default: inf, all at "
        "once.",
    )
    group.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="B",
        help="Shape of the gamma distribution of the times between requests: 1 is a Poisson process, a smaller value "
        "makes bursts. Default: 1.",
    )
    group.add_argument("--max-concurrency", type=count, metavar="N", help="Closed loop: at most N requests at a time.")


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        help="Source of the requests: random, published (see bench throughput) or custom (see --dataset-path). "
        "Default: random.",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help='File of the dataset custom: one JSON object per line with "prompt" or "messages", and optionally '
        '"output_tokens".',
    )
    group.add_argument(
        "--num-prompts",
        type=count,
        metavar="N",
        help=f"Number of requests. Default: {NUM_RANDOM}, published {NUM_PUBLISHED}, custom the whole file.",
    )
    group.add_argument(
        "--random-input-len", type=count, default=1024, metavar="N", help="Random: prompt tokens. Default: %(default)s."
    )
    group.add_argument(
        "--random-output-len", type=count, default=128, metavar="N", help="Random: output tokens. Default: %(default)s."
    )
    group.add_argument(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        metavar="X",
        help="Random: lengths are drawn from (1 - X) to (1 + X) times these. Default: 0.",
    )
    group.add_argument(
        "--custom-output-len",
        type=count,
        default=256,
        metavar="N",
        help='Custom: output tokens of lines without "output_tokens". Default: %(default)s.',
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="Recorded trace to replay, Azure's (.csv) or Mooncake's (.jsonl)."
    )
    group.add_argument(
        "--trace-speedup",
        type=positive,
        default=1.0,
        metavar="X",
        help="Factor by which the trace is replayed faster; inf sends all requests at once. Default: 1.",
    )
    group.add_argument("--trace-limit", type=count, metavar="N", help="Replay only the first N requests of the trace.")


def _add_request(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seed",
        type=whole_number,
        default=0,
        metavar="N",
        help="Random seed of lengths, tokens and arrival times. Default: %(default)s.",
    )
    group.add_argument(
        "--vocab-size", type=count, metavar="N", help="Token ids are below this number. Default: 10,001."
    )
    group.add_argument("--text-prompts", action="store_true", help="Send words instead of token ids.")
    group.add_argument(
        "--temperature",
        type=not_negative,
        metavar="X",
        help=f"Sampling temperature. Default: 0, published {PUBLISHED_TEMPERATURE}.",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Send ignore_eos, so that every output has its full length. A server that does not know the field may "
        "refuse the request. Default: on.",
    )
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="Further fields to send.")


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


def rates(text: str) -> list[float]:
    """Numbers above 0, separated by commas. A single one may be inf."""
    parts = text.split(",")
    return [positive(text)] if len(parts) == 1 else [positive_finite(part) for part in parts]


def limit(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition(":")
    if name not in GOODPUT_NAMES:
        *others, last = (f"{known}:MS" for known in GOODPUT_NAMES)
        raise argparse.ArgumentTypeError(f"{text!r}: write {', '.join(others)} or {last}")
    return name, positive(milliseconds)


# --- running ----------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> "Report":
    from nanovllm.bench.http_stream import parse_server
    from nanovllm.bench.serve_metrics import ServeReport
    from nanovllm.utils.open_files import allow_many_open_files

    _check_combination(args)
    server = parse_server(args.base_url, args.api_key)
    allow_many_open_files()
    measured = [_measure(load, server) for load in _loads(args)]
    if not any(one.row["completed"] for one in measured):
        raise NanoError("no request succeeded: " + "; ".join(measured[0].row["failure_examples"].values()))
    if args.plot is not None:
        args.plot.write_text(_draw(args, measured), encoding="utf-8")
    first = measured[0]
    settings = _settings(args, num_requests=len(first.outcomes))
    return ServeReport("serve", _environment(first.target), settings, [one.row for one in measured])


@dataclass(frozen=True)
class Measured:
    """The result for one request rate."""

    target: "Target"
    outcomes: "list[Outcome]"
    row: "Row"


def _loads(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments for each request rate. Each has a seed of its own: a prefix cache would know repeated prompts."""
    return [
        argparse.Namespace(**{**vars(args), "request_rate": rate, "seed": args.seed + index})
        for index, rate in enumerate(args.request_rate or [math.inf])
    ]


def _measure(load: argparse.Namespace, server: "Server") -> Measured:
    import asyncio

    from nanovllm.bench.serve_metrics import measure
    from nanovllm.utils.short_pauses import short_pauses

    requests = choose_requests(load)
    with short_pauses():  # a pause of this program would look like one of the server
        target, outcomes = asyncio.run(_load(load, server, requests))
    rate = {"request_rate": load.request_rate} if math.isfinite(load.request_rate) else {}
    return Measured(target, outcomes, {**rate, **measure(outcomes, dict(load.goodput))})


def _draw(args: argparse.Namespace, measured: Sequence[Measured]) -> str:
    from nanovllm.bench.plot import draw
    from nanovllm.bench.rate_plot import draw_rates

    if len(measured) == 1:
        return draw(measured[0].outcomes, f"{measured[0].target.model}, {_load_in_words(args)}")
    caption = f"{measured[0].target.model}, {len(measured[0].outcomes)} requests per rate"
    return draw_rates([one.row for one in measured], caption, dict(args.goodput))


def choose_requests(args: argparse.Namespace) -> "list[Request]":
    """The requests that the arguments of one rate describe, with their arrival times."""
    from nanovllm.bench import traces

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
    if math.isinf(args.request_rate):
        return requests
    times = traces.arrivals(len(requests), rate=args.request_rate, burstiness=args.burstiness, seed=args.seed)
    return traces.scheduled(requests, times)


def _check_combination(args: argparse.Namespace) -> None:
    if args.trace is not None:
        for name, instead in {
            "request_rate": "the trace has arrival times; --trace-speedup scales them",
            "num_prompts": "use --trace-limit",
            "dataset_name": "the trace has its own requests",
            "dataset_path": "the trace has its own requests",
        }.items():
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} cannot be used with --trace: {instead}")
    elif args.trace_limit is not None or args.trace_speedup != 1:
        raise ConfigError("--trace-limit and --trace-speedup need --trace FILE")
    if (args.dataset_name == "custom") != (args.dataset_path is not None):
        raise ConfigError("--dataset-name custom and --dataset-path FILE must be given together")
    if args.dataset_name == "custom" and args.text_prompts:
        raise ConfigError("--text-prompts cannot be used with --dataset-name custom: its prompts are sent as they are")
    if args.plot is not None and not args.plot.resolve().parent.is_dir():
        raise ConfigError(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    if args.burstiness != 1 and args.request_rate in (None, [math.inf]):
        raise ConfigError("--burstiness needs --request-rate: without a rate all requests are sent at once")


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
    with tqdm(total=len(requests), unit="req", disable=None) as bar:  # None means only on a terminal
        outcomes = await drive(
            requests, target, max_concurrency=args.max_concurrency, on_end=lambda outcome: bar.update()
        )
    return target, outcomes


async def _first_model(server: "Server", ready_timeout: float | None) -> str:
    """The first model that the server lists. Waits up to `ready_timeout` seconds for the server."""
    import asyncio

    from nanovllm.bench.http_stream import RequestFailed, fetch

    deadline = asyncio.get_running_loop().time() + (ready_timeout or 0.0)
    while True:
        try:
            async with asyncio.timeout(ready_timeout or 30.0):
                body = await fetch(server, "/v1/models")
            return json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise NanoError(f"{server.authority}: /v1/models lists no model; give one with --model") from None
        except (RequestFailed, TimeoutError) as error:
            if asyncio.get_running_loop().time() > deadline:
                reason = str(error) or "no answer in time"
                raise NanoError(f"the server at {server.authority} is not ready: {reason}") from None
        await asyncio.sleep(SECONDS_BETWEEN_POLLS)


# --- the report -------------------------------------------------------------------------------------------------------


def _environment(target: "Target") -> dict[str, Any]:
    return {
        "model": target.model,
        "server": target.server.authority,
        "endpoint": target.endpoint,
        "nanovllm": __version__,
        "python": platform.python_version(),
    }


def _settings(args: argparse.Namespace, *, num_requests: int) -> dict[str, Any]:
    return {
        "requests": num_requests,
        "dataset": f"trace {args.trace.name}" if args.trace else args.dataset_name or "random",
        "load": _load_in_words(args),
        "seed": args.seed,
        "ignore_eos": args.ignore_eos,
        **({"goodput": dict(args.goodput)} if args.goodput else {}),
    }


def _load_in_words(args: argparse.Namespace) -> str:
    bound = f"at most {args.max_concurrency} at a time" if args.max_concurrency else ""
    if args.trace is not None and math.isfinite(args.trace_speedup):
        pace = f"arrivals of the trace, {args.trace_speedup:g} times as fast"
    elif args.request_rate not in (None, [math.inf]):
        listed = ", ".join(f"{rate:g}" for rate in args.request_rate)
        pace = f"{listed} requests/s, burstiness {args.burstiness:g}"
    else:
        pace = "" if bound else "all at once"
    return ", ".join(part for part in (pace, bound) if part)
