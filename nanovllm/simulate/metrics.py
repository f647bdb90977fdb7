"""Computes the metrics of a simulated run from the times of its requests."""

import math
from collections.abc import Sequence

import numpy as np

from nanovllm.bench.report import Row
from nanovllm.simulate.fleet import Outcome

PERCENTILES = (50, 90, 99)


def latencies(outcome: Outcome) -> dict[str, list[float]]:
    """In seconds, one per request that was not refused; an output of one token has no time per output token."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
    for arrival, first, ended in zip(outcome.arrivals, outcome.first_token, outcome.ended, strict=True):
        if math.isnan(ended):
            continue
        found["ttft"].append(first - arrival.seconds)
        found["e2e"].append(ended - arrival.seconds)
        if arrival.output_len > 1:
            found["tpot"].append((ended - first) / (arrival.output_len - 1))
    return found


def measure(outcome: Outcome) -> Row:
    """The metrics by name; latencies in milliseconds."""
    served = [
        (arrival, cached)
        for arrival, ended, cached in zip(outcome.arrivals, outcome.ended, outcome.num_cached, strict=True)
        if not math.isnan(ended)
    ]
    num_input = sum(arrival.input_len for arrival, _ in served)
    num_output = sum(arrival.output_len for arrival, _ in served)
    seconds = duration(outcome)
    busy = [100 * part / seconds if seconds else 0.0 for part in outcome.busy_seconds]
    row: Row = {
        "requests": len(served),
        "refused": len(outcome.arrivals) - len(served),
        "seconds": seconds,
        "requests_per_s": len(served) / seconds if seconds else 0.0,
        "input_tokens_per_s": num_input / seconds if seconds else 0.0,
        "output_tokens_per_s": num_output / seconds if seconds else 0.0,
        "cache_hit_percent": 100 * sum(cached for _, cached in served) / num_input if num_input else 0.0,
    }
    for name, values in latencies(outcome).items():
        row[f"{name}_mean_ms"] = 1e3 * float(np.mean(values)) if values else None
        row |= {f"{name}_p{percent}_ms": percentile_ms(values, percent) for percent in PERCENTILES}
    for percent in PERCENTILES:
        row[f"itl_p{percent}_ms"] = gap_percentile_ms(outcome.decode_gaps, percent)
    row["itl_max_ms"] = gap_percentile_ms(outcome.decode_gaps, 100)
    return row | {
        "preemptions": sum(outcome.num_preemptions),
        "steps": sum(outcome.num_steps),
        "busy_percent": float(np.mean(busy)),
        "least_busy_percent": min(busy),
        "most_busy_percent": max(busy),
        "max_requests_over_mean": _max_over_mean(outcome),
    }


def duration(outcome: Outcome) -> float:
    """From the first arrival to the last token."""
    return max((end for end in outcome.ended if not math.isnan(end)), default=0.0) - outcome.arrivals[0].seconds


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else None


def gap_percentile_ms(gaps: Sequence[tuple[float, int]], percent: float) -> float | None:
    """A percentile of the inter-token latencies, each given as (seconds, number of tokens that waited so long)."""
    if not gaps:
        return None
    seconds, counts = (np.array(column) for column in zip(*sorted(gaps), strict=True))
    reached = np.searchsorted(np.cumsum(counts), percent / 100 * counts.sum())
    return 1e3 * float(seconds[min(reached, len(seconds) - 1)])


def _max_over_mean(outcome: Outcome) -> float:
    """Requests of the replica that got the most, divided by the mean; 1 is perfectly even."""
    counts = np.bincount([index for index in outcome.replica if index >= 0], minlength=len(outcome.busy_seconds))
    return float(counts.max() / counts.mean()) if counts.any() else 0.0
