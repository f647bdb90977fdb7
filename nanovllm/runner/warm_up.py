"""The largest steps there can be, run once at the start: they compile the kernels and show what memory to keep free.

Every sequence of theirs lies in block 0, so they need no cache to speak of; what they compute is not looked at.
"""

from collections.abc import Callable, Iterable

import torch

from nanovllm.plan import NewRow, SeqPlan, StepPlan
from nanovllm.sampling_params import SamplingParams


def largest_steps(*, max_num_tokens: int, max_num_seqs: int, max_model_len: int) -> list[StepPlan]:
    """As many tokens as a step takes, from as many sequences as there can be, and the step that follows it."""
    num_seqs = min(max_num_seqs, max_num_tokens)
    length = max(1, min(max_num_tokens // num_seqs, max_model_len - 2))
    # logprobs are what takes most memory in sampling
    everything = SamplingParams(temperature=1.0, logprobs=1)
    rows = range(1, num_seqs + 1)
    chunks = tuple(SeqPlan(row, 0, length, samples=True) for row in rows)
    steps = []
    for params in (everything, SamplingParams(temperature=1.0)):
        new_rows = tuple(_new_row(row, length, params) for row in rows)
        steps.append(StepPlan(chunks=chunks, new_rows=new_rows))
    return steps


def _new_row(row: int, length: int, params: SamplingParams) -> NewRow:
    return NewRow(
        row=row,
        token_ids=(0,) * length,
        num_prompt_tokens=length,
        block_table=(),
        params=params,
        seed=0,
        stop_token_ids=(),
        bad_words=(),
    )


def peak_memory(run: Callable[[StepPlan], object], steps: Iterable[StepPlan], device: torch.device) -> int:
    """Bytes that the hungriest of these steps took beyond what was there before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for step in steps:
        run(step)
    return torch.cuda.max_memory_allocated(device) - before
