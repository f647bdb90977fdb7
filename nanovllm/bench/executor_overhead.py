"""What it costs a step that its workers are other processes, measured without a model.

A plan goes out to every rank, each rank answers, and the results are compared. All of that is on top of what the model
computes, at every step, so it should be short beside a decode step of a small model on a fast GPU: a millisecond.

The workers here have no model: a step gives fixed tokens at once. Two ways to run them:

  one at a time   launch a step, wait for it: the whole way there and back, during which a device would idle
  overlapped      the next step is launched before the last is waited for, as the engine does it: what is left is the
                  work that does not fit beside the step

The clock is the wall's, as waiting is what counts; on a machine with fewer cores than processes, they also wait for
each other.

    python -m nanovllm.bench.executor_overhead --num-workers 2 --num-seqs 256
"""

import argparse
import sys
import time
from collections.abc import Mapping
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
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def sample(self, masks: Mapping[int, bytes]) -> None:
        """Nothing is sampled."""

    def wait(self) -> StepResult:
        return self._result


class NoModel:
    """Nobody meets anybody: there is nothing to compute together."""

    port = 0

    def open_store(self, host: str) -> "NoModel":
        return self

    def build(self, start: Start, store: Any) -> "EmptyRunner":
        return EmptyRunner()


class EmptyRunner:
    num_blocks = 1
    startup_seconds: dict[str, float] = {}

    def __init__(self) -> None:
        self._results: dict[int, StepResult] = {}  # by the number of rows

    def launch(self, plan: StepPlan) -> EmptyStep:
        size = len(plan.sampled_rows())
        if size not in self._results:
            self._results[size] = StepResult(tokens=[[1000 + number] for number in range(size)])
        return EmptyStep(self._results[size])

    def embed(self, token_ids: list[int], block_tables: list[list[int]], pooling: str) -> list[float]:
        return [1.0]

    def close(self) -> None:
        """There is nothing to give back."""


def open_executor(num_workers: int) -> WorkersExecutor:
    workers = ProcessWorkers(
        num_workers, command=(sys.executable, "-m", "nanovllm.bench.executor_overhead", "--worker")
    )
    config = Config(tensor_parallel_size=num_workers)
    return WorkersExecutor(workers, config, Path("."), max_model_len=1)


def measure(executor: WorkersExecutor, plans: list[StepPlan], *, depth: int) -> list[float]:
    """Microseconds from one result to the next."""
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
    parser.add_argument("--num-workers", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--num-seqs", type=int, default=256, help="sequences that decode together (default: 256)")
    parser.add_argument("--num-steps", type=int, default=2000, help="steps to time of each kind (default: 2000)")
    args = parser.parse_args()

    executor = open_executor(args.num_workers)
    plan = StepPlan(decode_rows=tuple(range(args.num_seqs)))
    unchanged = [plan] * args.num_steps
    changed = [replace(plan, decode_rows=plan.decode_rows[n % 2 :]) for n in range(args.num_steps)]
    print(f"{args.num_workers} workers, {args.num_seqs} sequences, µs a step      median      p99")
    for kind, plans in (("unchanged rows", unchanged), ("rows that change", changed)):
        for way, depth in (("one at a time", 0), ("overlapped", 1)):
            times = measure(executor, plans, depth=depth)
            print(f"{kind:<18} {way:<24} {median(times):8.0f} {quantiles(times, n=100)[98]:8.0f}")
    executor.close()


if __name__ == "__main__":
    run(NoModel()) if "--worker" in sys.argv else main()
