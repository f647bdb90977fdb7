"""Computes the metrics of a load test from its requests, with vLLM's names."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nanovllm.bench.load import Outcome
from nanovllm.bench.report import Report, Row, table

TITLES = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total Token throughput (tok/s)",
    "max_concurrent_requests": "Peak concurrent requests",
    "shorter_than_asked": "Outputs shorter than requested",
    "p99_send_delay_ms": "P99 send delay (ms)",
}
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
RATE_COLUMNS = {
    "rate": "request_rate",
    "completed": "completed",
    "failed": "failed",
    "req/s": "request_throughput",
    "good req/s": "request_goodput",
    "tok/s": "output_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "ITL p50 ms": "median_itl_ms",
    "ITL p99 ms": "p99_itl_ms",
}
WIDTH, TITLE_WIDTH = 50, 40  # as in vLLM's summary


def measure(outcomes: Sequence[Outcome], goodput: Mapping[str, float] | None = None) -> Row:
    """The metrics by name. Tokens and latencies count complete answers only; failures are counted by kind.

    `goodput` maps latency names to limits in milliseconds; see `is_good`.
    """
    whole = [outcome for outcome in outcomes if outcome.failure is None]
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    duration = max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    num_input, num_output = (
        sum(outcome.num_input_tokens for outcome in whole),
        sum(o.num_output_tokens for o in whole),
    )
    row: Row = {
        "completed": len(whole),
        "failed": len(failures),
        "failures": dict(Counter(failure.kind for failure in failures).most_common()),
        "failure_examples": {failure.kind: str(failure) for failure in reversed(failures)},
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(whole) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_concurrent_requests": peak_concurrency(outcomes),
        "shorter_than_asked": sum(outcome.num_output_tokens < outcome.wanted_output_tokens for outcome in whole),
        "p99_send_delay_ms": _percentile([(outcome.sent - outcome.begin) * 1e3 for outcome in outcomes], 99),
    }
    if goodput:
        row["request_goodput"] = sum(is_good(outcome, goodput) for outcome in whole) / duration
    for name, values in latencies(whole).items():
        row |= {
            f"mean_{name}_ms": float(np.mean(values)) if values else None,
            f"median_{name}_ms": _percentile(values, 50),
            f"p99_{name}_ms": _percentile(values, 99),
        }
    return row


def latencies(whole: Iterable[Outcome]) -> dict[str, list[float]]:
    """In milliseconds: one per request, and for the inter-token latency one per piece after the first."""
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for outcome in whole:
        for name, seconds in _single(outcome).items():
            if seconds is not None:
                found[name].append(seconds * 1e3)
        found["itl"] += [gap * 1e3 for gap in outcome.gaps]
    return found


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether the request met every limit; the limit of `itl` applies to its longest time between two pieces.

    With one output token the limits of `tpot` and `itl` are met.
    """
    seconds = _single(outcome) | {"itl": max(outcome.gaps, default=None)}
    return all((seconds[name] or 0.0) * 1e3 <= limit for name, limit in limits.items())


def _single(outcome: Outcome) -> dict[str, float | None]:
    return {
        "ttft": outcome.first_token_seconds,
        "tpot": outcome.seconds_per_token,
        "e2el": outcome.seconds,
    }


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    changes = [(time, change) for o in outcomes for time, change in ((o.sent, 1), (o.ended, -1))]
    in_flight = peak = 0
    for _, change in sorted(changes):  # at equal times, ends sort first
        in_flight += change
        peak = max(peak, in_flight)
    return peak


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


# --- text -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServeReport(Report):
    """Prints one result in vLLM's format, so that tools for that format can read it, and several as a table."""

    def __str__(self) -> str:
        head = str(Report(self.benchmark, self.environment, self.settings, [{"": ""}])).rstrip()
        body = summary(self.results[0]) if len(self.results) == 1 else rate_table(self.results)
        return f"{head}\n\n{body}"


def summary(row: Row) -> str:
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    for name, title in TITLES.items():
        if name in row:
            lines.append(_line(title, row[name]))
        if name == "failed":
            lines += [_line(f"  {kind}", count) for kind, count in row["failures"].items()]
    for name, title in LATENCIES.items():
        lines.append(f"{title:-^{WIDTH}}")
        for kind in ("mean", "median", "p99"):
            lines.append(_line(f"{kind.capitalize()} {name.upper()} (ms)", row[f"{kind}_{name}_ms"]))
    lines.append("=" * WIDTH)
    lines += [f"failed: {example}" for example in row["failure_examples"].values()]
    return "\n".join(lines)


def rate_table(rows: Sequence[Row]) -> str:
    """The main metrics with one line per request rate. The JSON document has all of them."""
    shown = [{title: row.get(name) for title, name in RATE_COLUMNS.items()} for row in rows]
    columns = [title for title in RATE_COLUMNS if any(row[title] is not None for row in shown)]
    lines = [table([{title: "-" if row[title] is None else row[title] for title in columns} for row in shown])]
    examples = {kind: example for row in rows for kind, example in row["failure_examples"].items()}
    return "\n".join([*lines, *(f"failed: {example}" for example in examples.values())])


def _line(title: str, value: float | None) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title + ':':<{TITLE_WIDTH}} {shown:<9}".rstrip()
