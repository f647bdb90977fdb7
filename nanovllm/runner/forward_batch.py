"""One step as the model sees it: flat token tensors and the attention backend's view of them."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, BatchGeometry
from nanovllm.layers.step import Sequences, Step
from nanovllm.plan import StepPlan
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.upload import Upload


@dataclass(frozen=True)
class ForwardBatch:
    rows: Tensor  # [num_tokens] int32 row of the request table that each token belongs to
    positions: Tensor  # [num_tokens] int32
    step: Step  # as the layers see it
    sampled_rows: Tensor | None  # [num_sampled] int32 rows of the request table; None = nobody samples
    logits_rows: Tensor | None  # [head_size] int32 token index of each sampling row, padded; None = every token samples
    first_tokens: np.ndarray  # [num_decodes + num_chunks] token index of each sequence's first token, on the host


def step_capacity(*, max_num_tokens: int, max_num_seqs: int) -> int:
    """Integers that a step may upload: a row and a position a token, and what describes sequences and their tiles."""
    return 4 * max_num_tokens + 16 * max_num_seqs


def build_batch(
    plan: StepPlan,
    table: RequestTable,
    backend: AttentionBackend,
    upload: Upload,
    *,
    head_size: int,
    keeps_row_state: bool = False,
) -> ForwardBatch:
    """Tensors are valid once `upload` is sent.

    `head_size`: how many rows get logits, padding included. `keeps_row_state`: a layer of the model does.
    """
    num_decodes = len(plan.decode_rows)
    rows = np.array(plan.decode_rows + tuple(chunk.row for chunk in plan.chunks), dtype=np.int64)
    starts = table.host_length[rows] - 1
    num_new = np.ones(len(rows), dtype=np.int64)
    for index, chunk in enumerate(plan.chunks, num_decodes):
        starts[index], num_new[index] = chunk.start, chunk.num_new
    first_tokens = np.cumsum(num_new) - num_new
    seqs = np.repeat(np.arange(len(rows)), num_new)
    positions = starts[seqs] + np.arange(len(seqs)) - first_tokens[seqs]
    samples = np.ones(len(rows), dtype=bool)
    samples[num_decodes:] = [chunk.samples for chunk in plan.chunks]
    num_sampled = int(samples.sum())
    logits_rows = np.zeros(head_size, dtype=np.int64)
    logits_rows[:num_sampled] = (first_tokens + num_new - 1)[samples]

    num_blocks = int((starts + num_new - 1).max()) // table.block_size + 1
    device_rows, device_positions = upload.add(rows[seqs]), upload.add(positions)
    geometry = BatchGeometry(
        num_decodes=num_decodes,
        rows=rows,
        starts=starts,
        num_new=num_new,
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
        sequences = Sequences(*map(upload.add, (rows, starts, first_tokens, num_new)))
    return ForwardBatch(
        rows=device_rows,
        positions=device_positions,
        step=Step(backend.prepare(geometry, upload.add), sequences),
        sampled_rows=upload.add(rows[samples]) if num_sampled else None,
        logits_rows=None if num_sampled == len(positions) else upload.add(logits_rows),
        first_tokens=first_tokens,
    )
