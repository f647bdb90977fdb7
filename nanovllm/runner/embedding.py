"""One vector for a whole text: the model's hidden states, behind the last token or on average."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, BatchGeometry
from nanovllm.layers.step import Sequences, Step
from nanovllm.runner.stage import Stage


def embed(
    stage: Stage,
    backend: AttentionBackend,
    states: list[Any],
    token_ids: list[int],
    block_tables: dict[int | None, list[int]],  # by window
    *,
    pooling: str,  # "last" or "mean"
    max_num_tokens: int,  # computed at once
) -> Tensor:  # [hidden] float32
    device = backend.shape.device
    tokens = torch.tensor([token_ids], dtype=torch.int32, device=device)
    blocks = {w: torch.tensor([table], dtype=torch.int32, device=device) for w, table in block_tables.items()}
    total = torch.zeros(stage.model.spec.hidden_size, dtype=torch.float32, device=device)
    last = total
    for start in range(0, len(token_ids), max_num_tokens):
        end = min(start + max_num_tokens, len(token_ids))
        chunk = _one_chunk(start, end, block_tables, blocks, device)
        x = stage.inputs(tokens, chunk.device_rows, chunk.device_positions)
        attention = backend.prepare(chunk, lambda values: _upload(values, device))
        x_out = stage.forward(x, states, Step(attention, _sequences(start, end, device)))
        if x_out is not None:
            assert stage.model.norm is not None
            hidden = stage.model.norm(x_out).float()
            total, last = total + hidden.sum(dim=0), hidden[-1]
    return stage.agree(last.contiguous() if pooling == "last" else total / len(token_ids))


def _one_chunk(
    start: int,
    end: int,
    block_tables: dict[int | None, list[int]],
    blocks: dict[int | None, Tensor],  # the same on the device, [1, num_blocks]
    device: torch.device,
) -> BatchGeometry:
    """Positions [start, end) of the only sequence there is."""
    zero, rows, positions = np.zeros(1, dtype=np.int64), np.zeros(end - start, dtype=np.int64), np.arange(start, end)
    return BatchGeometry(
        num_decodes=0,
        rows=zero,
        starts=np.array([start]),
        num_new=np.array([end - start]),
        first_tokens=zero,
        token_seqs=rows,
        positions=positions,
        block_tables={window: np.array([table]) for window, table in block_tables.items()},
        device_rows=_upload(rows, device),
        device_positions=_upload(positions, device),
        device_blocks=blocks,
    )


def _sequences(start: int, end: int, device: torch.device) -> Sequences:
    """The sequence's state lies at the row that padding uses."""
    return Sequences(*(torch.tensor([value], dtype=torch.int32, device=device) for value in (0, start, 0, end - start)))


def _upload(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)
