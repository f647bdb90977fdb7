"""What the control plane costs a step, measured without a model.

While the device computes, Python decides what comes next. If that takes longer than the step, the device waits for
Python, and a decode step of a small model on a fast GPU lasts about a millisecond. So the scheduler's work should
follow what changes, not what runs. Two kinds of decode step show whether it does:

  unchanged   no sequence needs anything. The plan is the very same object as the step before; what is left is a
              comparison and an addition a sequence to schedule, and an appended token to update
  new blocks  a sixteenth of the sequences have filled their last KV block: each of them gets a new one, and the full
              one becomes findable in the prefix cache. (Blocks of 16 tokens and lengths spread evenly over them make
              this every step; with larger blocks it is rarer.)

Every step gets the same list of tokens back, so nothing but `schedule()` and `update()` is on the clock, and the clock
is that of this thread alone: other processes do not count. The median is the cost; the 99th percentile also shows
hiccups, such as the garbage collector's.

    python -m nanovllm.bench.control_plane --num-seqs 256
"""

import argparse
import time
from statistics import median, quantiles

from nanovllm.config import SchedulerConfig
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepResult
from nanovllm.sampling_params import SamplingParams
from nanovllm.state import BlockGroup

PROMPT_LEN = 100
SMALL_BLOCK = 16


def decoding_scheduler(*, num_seqs: int, num_steps: int, block_size: int) -> Scheduler:
    """A scheduler whose sequences are all prefilled and have `num_steps` to go; their lengths are spread evenly."""
    max_model_len = PROMPT_LEN + SMALL_BLOCK + num_steps + 2
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=num_seqs * max_model_len,
            max_num_seqs=num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            groups=(BlockGroup(num_seqs * -(-max_model_len // block_size)),),
            enable_prefix_caching=True,
        )
    )
    params = SamplingParams(max_tokens=num_steps + 2)
    for number in range(num_seqs):
        prompt = [number] * (PROMPT_LEN + number % SMALL_BLOCK)
        max_num_tokens = len(prompt) + num_steps + 2
        scheduler.add(
            Sequence(str(number), prompt, params, max_num_tokens=max_num_tokens, stop_token_ids=frozenset({0}))
        )
    take_step(scheduler, StepResult(tokens=[[1]] * num_seqs))
    return scheduler


def take_step(scheduler: Scheduler, result: StepResult) -> tuple[float, float]:
    """Microseconds of CPU time in schedule() and in update()."""
    start = time.thread_time_ns()
    plan = scheduler.schedule()
    scheduled = time.thread_time_ns()
    assert plan is not None
    scheduler.update(plan, result)
    return (scheduled - start) / 1000, (time.thread_time_ns() - scheduled) / 1000


def measure(*, num_seqs: int, num_steps: int, block_size: int) -> list[tuple[float, float]]:
    scheduler = decoding_scheduler(num_seqs=num_seqs, num_steps=num_steps, block_size=block_size)
    result = StepResult(tokens=[[1]] * num_seqs)
    return [take_step(scheduler, result) for _ in range(num_steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time schedule() + update() of a decode step, without a model.")
    parser.add_argument("--num-seqs", type=int, default=256, help="sequences that decode together (default: 256)")
    parser.add_argument("--num-steps", type=int, default=1000, help="steps to time of each kind (default: 1000)")
    args = parser.parse_args()

    print(f"{args.num_seqs} sequences, µs a step   schedule + update = median      p99")
    never_full = PROMPT_LEN + SMALL_BLOCK + args.num_steps + 2
    for kind, block_size in (("unchanged", never_full), ("new blocks", SMALL_BLOCK)):
        times = measure(num_seqs=args.num_seqs, num_steps=args.num_steps, block_size=block_size)
        schedule, update = (median(column) for column in zip(*times, strict=True))
        totals = [sum(pair) for pair in times]
        p99 = quantiles(totals, n=100)[98]
        print(f"{kind:<28} {schedule:8.0f} + {update:6.0f} = {median(totals):6.0f} {p99:8.0f}")


if __name__ == "__main__":
    main()
