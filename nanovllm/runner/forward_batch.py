"""One step as the model sees it: flat token tensors and the attention backend's view of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from nanovllm.attention.backend import BatchGeometry
from nanovllm.layers.step import Step
from nanovllm.plan import StepPlan
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.upload import Upload

if TYPE_CHECKING:
    from nanovllm.runner.verification import Verification


@dataclass(frozen=True)
class ForwardBatch:
    rows: Tensor  # [num_tokens] int32 row of the request table that each token belongs to
    positions: Tensor  # [num_tokens] int32
    step: Step  # as the layers see it
    sampled_rows: Tensor | None  # [num_sampled] int32 rows of the request table; None = nothing is sampled
    verification: "Verification | None"  # None = every sampled row samples one token, after its last one
    logits_rows: Tensor | None  # [head_size] int32 token index of each sampled position, repeated; None = all tokens
    first_tokens: np.ndarray  # [num_decodes + num_row_steps] token index of each sequence's first token, on the host


def step_capacity(*, max_num_tokens: int, max_num_seqs: int) -> int:
    """Integers that a step may upload: row and position of each token, what is sampled after it where proposed tokens
    are verified, and what describes sequences and their tiles."""
    return 8 * max_num_tokens + 16 * max_num_seqs


def build_batch(
    plan: StepPlan,
    table: RequestTable,
    prepare: Callable[[BatchGeometry, Callable[[np.ndarray], Tensor]], Any],
    upload: Upload,
    *,
    head_size: int,
    keeps_row_state: bool = False,
) -> ForwardBatch:
    """Tensors are valid once `upload` is sent. `prepare` is that of the attention backend. `head_size` is the number of
    rows that get logits, with padding. `keeps_row_state`: a layer of the model does."""
    num_decodes = len(plan.decode_rows)
    rows = np.array(plan.decode_rows + tuple(step.row for step in plan.row_steps), dtype=np.int64)
    starts = table.host_length[rows] - 1
    num_new = np.ones(len(rows), dtype=np.int64)
    num_sampled = np.ones(len(rows), dtype=np.int64)
    for index, step in enumerate(plan.row_steps, num_decodes):
        starts[index], num_new[index], num_sampled[index] = step.start, step.num_new, step.num_sampled
    first_tokens = np.cumsum(num_new) - num_new
    seqs = np.repeat(np.arange(len(rows)), num_new)
    positions = starts[seqs] + np.arange(len(seqs)) - first_tokens[seqs]
    sampled_seqs, sampled_tokens = _sampled(first_tokens + num_new, num_sampled)
    logits_rows = np.resize(sampled_tokens, head_size if len(sampled_tokens) else 0)

    num_blocks = int((starts + num_new - 1).max()) // table.block_size + 1
    device_rows, device_positions = upload.add(rows[seqs]), upload.add(positions)
    geometry = BatchGeometry(
        num_decodes=num_decodes,
        rows=rows,
        starts=starts,
        num_new=num_new,
        num_sampled=num_sampled,
        first_tokens=first_tokens,
        token_seqs=seqs,
        positions=positions,
        block_tables={window: blocks[rows, :num_blocks] for window, blocks in table.host_blocks.items()},
        device_rows=device_rows,
        device_positions=device_positions,
        device_blocks=table.blocks,
    )
    sequences = None
    if keeps_row_state:
        from nanovllm.layers.sequences import Sequences

        sequences = Sequences.of(upload.add, rows, starts, first_tokens, num_new, seqs, num_decodes=num_decodes)
    verification = None
    if any(step.proposed for step in plan.row_steps):
        from nanovllm.runner.verification import Verification

        lengths = table.host_length[rows] + (num_sampled == 1)
        verification = Verification(
            plan,
            lengths=upload.add(positions[sampled_tokens] + 1),
            new_lengths=upload.add(lengths[sampled_seqs]),
        )
    return ForwardBatch(
        rows=device_rows,
        positions=device_positions,
        step=Step(prepare(geometry, upload.add), sequences, device_positions),
        sampled_rows=upload.add(rows[sampled_seqs]) if len(sampled_seqs) else None,
        verification=verification,
        logits_rows=None if len(sampled_seqs) == len(positions) else upload.add(logits_rows),
        first_tokens=first_tokens,
    )


def _sampled(ends: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last `counts` tokens before `ends` of each sequence: [num_sampled] sequence and token index of each."""
    seqs = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(seqs)) - (np.cumsum(counts) - counts)[seqs]
    return seqs, (ends - counts)[seqs] + within
