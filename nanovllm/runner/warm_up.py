"""The largest possible steps, run once at the start: they compile kernels and show how much memory activations take.

All their sequences use block 0, so they need a cache of one block; their results are not used.
"""

from collections.abc import Callable

import torch

from nanovllm.kernels.select import warm_up_sizes
from nanovllm.plan import NewRow, RowStep, StepPlan
from nanovllm.runner.logprobs import score
from nanovllm.sampling_params import SamplingParams

NUM_LOGPROBS = 20


def largest_steps(*, max_num_tokens: int, max_num_seqs: int, max_model_len: int) -> list[StepPlan]:
    """One for each size at which other kernels may run: the largest with as many sequences as possible, the others with
    few long ones, whose attention has a kernel of its own."""
    longest = max(1, max_model_len - 2)
    steps = []
    for size in warm_up_sizes(max_num_tokens):
        num_seqs = min(max_num_seqs, size) if size == max_num_tokens else min(max_num_seqs, -(-size // longest))
        steps.append(_step(num_seqs, max(1, min(size // num_seqs, longest))))
    return steps


def _step(num_seqs: int, length: int) -> StepPlan:
    rows = range(1, num_seqs + 1)
    params = SamplingParams(temperature=1.0)
    return StepPlan(
        row_steps=tuple(RowStep(row, 0, length, num_sampled=1) for row in rows),
        new_rows=tuple(
            NewRow(
                row=row,
                token_ids=(0,) * length,
                num_prompt_tokens=length,
                block_tables=(),
                params=params,
                seed=0,
                stop_token_ids=(),
                bad_words=(),
            )
            for row in rows
        ),
    )


def score_everything(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compute the logprobs of all rows, which takes the most memory in sampling."""
    logits = torch.zeros(num_rows, vocab_size, dtype=dtype, device=device)
    chosen = torch.zeros(num_rows, dtype=torch.int64, device=device)
    score(logits.float().log_softmax(dim=-1), chosen, NUM_LOGPROBS)


def peak_memory(run: Callable[[], object], device: torch.device) -> int:
    """The peak of allocated bytes while `run` runs, beyond those allocated before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before
