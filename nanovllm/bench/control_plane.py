"""CPU time that the scheduler takes per step, measured without a model.

While the device computes a step, Python schedules the next one. If that takes longer than the step, the device waits,
and a decode step of a small model on a fast GPU takes about a millisecond. So the scheduler's work should grow with the
number of changes, not with the number of running sequences. Two kinds of decode step show whether it does:

  unchanged   no sequence changes. The plan is the same object as in the step before; schedule() does a comparison and
              an addition per sequence, update() appends a token
  new blocks  one sixteenth of the sequences have filled their last KV cache block: each gets a new one, and the full
              one enters the prefix cache. (Blocks of 16 tokens, with lengths spread evenly over them, make this happen
              in every step; with larger blocks it is rarer.)

Every step returns the same list of tokens, so only `schedule()` and `update()` are measured, in CPU time of this
thread: other processes do not count. The median is the cost; the 99th percentile includes pauses such as the garbage
collector's.

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
    """A scheduler with all prompts computed and `num_steps` decode steps left; lengths are spread over a block."""
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
    parser.add_argument("--num-seqs", type=int, default=256, help="Number of sequences in a step. Default: 256.")
    parser.add_argument(
        "--num-steps", type=int, default=1000, help="Number of steps to time of each kind. Default: 1000."
    )
    args = parser.parse_args()

    print(f"{args.num_seqs} sequences, µs per step schedule + update = median      p99")
    never_full = PROMPT_LEN + SMALL_BLOCK + args.num_steps + 2
    for kind, block_size in (("unchanged", never_full), ("new blocks", SMALL_BLOCK)):
        times = measure(num_seqs=args.num_seqs, num_steps=args.num_steps, block_size=block_size)
        schedule, update = (median(column) for column in zip(*times, strict=True))
        totals = [sum(pair) for pair in times]
        p99 = quantiles(totals, n=100)[98]
        print(f"{kind:<28} {schedule:8.0f} + {update:6.0f} = {median(totals):6.0f} {p99:8.0f}")


if __name__ == "__main__":
    main()
