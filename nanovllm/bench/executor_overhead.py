"""Time that a step takes longer because its workers are other processes, measured without a model.

In every step the engine sends a plan to all ranks, each rank replies, and the engine compares the results. This should
take much less than a decode step of a small model on a fast GPU, which is about a millisecond.

The workers of this benchmark have no model: they return fixed tokens at once. Two ways to run them:

  one at a time   launch a step and wait for its result: the whole round trip, during which a device would be idle
  overlapped      launch the next step before waiting for the last one, as the engine does: only the work that does not
                  overlap with the step remains

Times are wall-clock times, because waiting counts. On a machine with fewer cores than processes, the processes also
wait for each other.

    python -m nanovllm.bench.executor_overhead --num-workers 2 --num-seqs 256
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from nanovllm.config import Config
from nanovllm.executor.messages import Start
from nanovllm.executor.multiproc import ProcessWorkers
from nanovllm.executor.worker import run
from nanovllm.executor.workers import WorkersExecutor
from nanovllm.plan import StepPlan, StepResult


class EmptyStep:
    """A launched step whose result is already known."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        """Nothing is sampled."""

    def wait(self) -> StepResult:
        return self._result


class NoModel:
    """Builds runners without a model, which need no store to find each other."""

    port = 0

    def open_store(self, host: str) -> "NoModel":
        return self

    def build(self, start: Start, store: Any) -> "EmptyRunner":
        return EmptyRunner()


class EmptyRunner:
    """Returns fixed tokens for any plan."""

    num_blocks = 1
    startup_seconds: dict[str, float] = {}

    def __init__(self) -> None:
        self._results: dict[int, StepResult] = {}  # by the number of rows

    def launch(self, plan: StepPlan) -> EmptyStep:
        size = len(plan.decode_rows)
        if size not in self._results:
            self._results[size] = StepResult(tokens=[[1000 + number] for number in range(size)])
        return EmptyStep(self._results[size])

    def close(self) -> None:
        """There is nothing to free."""


def open_executor(num_workers: int) -> WorkersExecutor:
    workers = ProcessWorkers(
        num_workers, command=(sys.executable, "-m", "nanovllm.bench.executor_overhead", "--worker")
    )
    config = Config(tensor_parallel_size=num_workers)
    return WorkersExecutor(workers, config, Path("."), max_model_len=1)


def measure(executor: WorkersExecutor, plans: list[StepPlan], *, depth: int) -> list[float]:
    """Microseconds from one result to the next, with `depth` further steps in flight."""
    pending = [executor.launch(plan) for plan in plans[:depth]]
    times = []
    last = time.perf_counter()
    for plan in plans[depth:]:
        pending.append(executor.launch(plan))
        pending.pop(0).wait()
        now = time.perf_counter()
        times.append(1e6 * (now - last))
        last = now
    for step in pending:
        step.wait()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step of workers that have no model.")
    parser.add_argument("--num-workers", type=int, default=2, help="Number of ranks. Default: 2.")
    parser.add_argument("--num-seqs", type=int, default=256, help="Number of sequences in a step. Default: 256.")
    parser.add_argument(
        "--num-steps", type=int, default=2000, help="Number of steps to time of each kind. Default: 2000."
    )
    args = parser.parse_args()

    executor = open_executor(args.num_workers)
    plan = StepPlan(decode_rows=tuple(range(args.num_seqs)))
    unchanged = [plan] * args.num_steps
    changed = [replace(plan, decode_rows=plan.decode_rows[n % 2 :]) for n in range(args.num_steps)]
    print(f"{args.num_workers} workers, {args.num_seqs} sequences, µs per step    median      p99")
    for kind, plans in (("unchanged rows", unchanged), ("rows that change", changed)):
        for way, depth in (("one at a time", 0), ("overlapped", 1)):
            times = measure(executor, plans, depth=depth)
            print(f"{kind:<18} {way:<24} {median(times):8.0f} {quantiles(times, n=100)[98]:8.0f}")
    executor.close()


if __name__ == "__main__":
    run(NoModel()) if "--worker" in sys.argv else main()
