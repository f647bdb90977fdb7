"""One step as the model sees it: flat token tensors and the attention backend's view of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, BatchGeometry
from nanovllm.plan import StepPlan
from nanovllm.runner.request_table import RequestTable


@dataclass(frozen=True)
class ForwardBatch:
    input_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    attn: Any  # what the attention backend prepared for this step
    logits_rows: Tensor | None  # [num_sampled] token index of each sampling row; None = every token samples
    first_tokens: np.ndarray  # [num_decodes + num_chunks] token index of each sequence's first token, on the host


def build_batch(plan: StepPlan, table: RequestTable, backend: AttentionBackend, device: torch.device) -> ForwardBatch:
    num_decodes = len(plan.decode_rows)
    rows = np.array(plan.decode_rows + tuple(chunk.row for chunk in plan.chunks), dtype=np.int64)
    starts = table.length[rows] - 1
    num_new = np.ones(len(rows), dtype=np.int64)
    for index, chunk in enumerate(plan.chunks, num_decodes):
        starts[index], num_new[index] = chunk.start, chunk.num_new
    first_tokens = np.cumsum(num_new) - num_new
    seqs = np.repeat(np.arange(len(rows)), num_new)
    positions = starts[seqs] + np.arange(len(seqs)) - first_tokens[seqs]
    samples = np.ones(len(rows), dtype=bool)
    samples[num_decodes:] = [chunk.samples for chunk in plan.chunks]
    last_tokens = (first_tokens + num_new - 1)[samples]

    num_blocks = int((starts + num_new - 1).max()) // backend.block_size + 1
    geometry = BatchGeometry(
        num_decodes=num_decodes,
        starts=starts,
        num_new=num_new,
        first_tokens=first_tokens,
        token_seqs=seqs,
        positions=positions,
        block_tables=table.blocks[rows, :num_blocks],
    )
    device_positions = torch.from_numpy(positions).to(device)
    return ForwardBatch(
        input_ids=table.tokens[torch.from_numpy(rows[seqs]).to(device), device_positions],
        positions=device_positions,
        attn=backend.prepare(geometry),
        logits_rows=None if len(last_tokens) == len(positions) else torch.from_numpy(last_tokens).to(device),
        first_tokens=first_tokens,
    )
