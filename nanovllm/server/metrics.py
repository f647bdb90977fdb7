"""Counters and histograms in Prometheus' text format, under the names that vLLM's dashboards use."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.remote.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
TOKENS = tuple(float(1 << power) for power in range(18))


class Counter:
    """A counter; with a label, one total per value of the label."""

    def __init__(self, name: str, about: str, label: str | None = None) -> None:
        self.name, self.about, self._label = name, about, label
        self._totals: dict[str, float] = {}

    def add(self, amount: float = 1, label: str = "") -> None:
        self._totals[label] = self._totals.get(label, 0) + amount

    def lines(self, common: str) -> Iterable[str]:
        yield from _head(self.name, "counter", self.about)
        totals = self._totals or ({} if self._label else {"": 0})
        for value, total in totals.items():
            labels = f'{common},{self._label}="{value}"' if self._label else common
            yield f"{self.name}{{{labels}}} {total}"


class Histogram:
    """A histogram whose buckets have the upper `bounds`, and infinity."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self._bounds = name, about, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, common: str) -> Iterable[str]:
        yield from _head(self.name, "histogram", self.about)
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{{common},le="{bound}"}} {total}'
        yield f"{self.name}_sum{{{common}}} {self._sum}"
        yield f"{self.name}_count{{{common}}} {total}"


class Metrics:
    """The server's own metrics of requests. `render` adds the statistics of the engine."""

    def __init__(self) -> None:
        self.succeeded = Counter("vllm:request_success_total", "Completions that finished.", label="finished_reason")
        self.failed = Counter("nanovllm:request_errors_total", "Requests that got an error response.", label="status")
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS
        )
        self.inter_token_latency = Histogram(
            "vllm:inter_token_latency_seconds", "Between two deltas of a completion.", SECONDS
        )
        self.time_per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "A completion's mean time per token after the first.",
            SECONDS,
        )
        self.queue_time = Histogram(
            "vllm:request_queue_time_seconds", "From a request's arrival in the engine to its first step.", SECONDS
        )
        self.end_to_end = Histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its last token.", SECONDS
        )
        self.prompt_tokens = Histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.generation_tokens = Histogram("vllm:request_generation_tokens", "Tokens of a completion.", TOKENS)

    def render(self, model: str, stats: "EngineStats | None", *, started: float) -> str:
        """All metrics as text. `started` is the server's start, in seconds of `time.monotonic()`."""
        common = f'model_name="{_escape(model)}",engine="0"'
        lines = [line for metric in vars(self).values() for line in metric.lines(common)]
        lines += _one(
            "nanovllm:uptime_seconds", "gauge", "Time since the server started.", time.monotonic() - started, common
        )
        lines += _process_lines()
        if stats is not None:
            lines += _engine_lines(stats, common)
        return "\n".join(lines) + "\n"


def _engine_lines(stats: "EngineStats", common: str) -> list[str]:
    in_use = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
    usage = in_use / stats.num_blocks if stats.num_blocks else 0.0
    table = [
        ("num_requests_running", "gauge", "Sequences in the running batch.", stats.num_running),
        ("num_requests_waiting", "gauge", "Sequences waiting to be scheduled.", stats.num_waiting),
        ("kv_cache_usage_perc", "gauge", "Fraction of the KV cache in use; 1 is full.", usage),
        (
            "num_preemptions_total",
            "counter",
            "Sequences that had to free their KV blocks.",
            stats.num_preemptions,
        ),
        ("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
        ("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ("prompt_tokens_total", "counter", "Prompt tokens, computed or cached.", stats.num_prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens generated.", stats.num_generation_tokens),
    ]
    return [
        line for name, kind, about, value in table for line in _one(f"vllm:{name}", kind, about, float(value), common)
    ]


def _process_lines() -> list[str]:
    """Metrics of the server's process, under the names that all Prometheus clients use."""
    name = "process_cpu_seconds_total"
    return [*_head(name, "counter", "CPU time of the server's process."), f"{name} {time.process_time()}"]


def _one(name: str, kind: str, about: str, value: float, common: str) -> list[str]:
    return [*_head(name, kind, about), f"{name}{{{common}}} {value}"]


def _head(name: str, kind: str, about: str) -> tuple[str, str]:
    return f"# HELP {name} {about}", f"# TYPE {name} {kind}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
