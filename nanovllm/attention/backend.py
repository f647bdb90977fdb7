"""What an attention implementation must offer; `sdpa.py` is the plain one that all others are tested against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

UNEVEN = 6  # times the mean length


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    windows: tuple[int | None, ...]  # of each layer; layers with equal windows share a block table
    dtype: torch.dtype  # the model computes in
    cache_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class BatchGeometry:
    """Who attends to what in one step, on the host. Decodes (one token each) come first, then prefill chunks."""

    num_decodes: int
    rows: np.ndarray  # [num_seqs] of the request table
    starts: np.ndarray  # [num_seqs] position of each sequence's first new token
    num_new: np.ndarray  # [num_seqs] new tokens; 1 for decodes
    first_tokens: np.ndarray  # [num_seqs] index of the sequence's first new token among the step's tokens
    token_seqs: np.ndarray  # [num_tokens] which sequence each token belongs to
    positions: np.ndarray  # [num_tokens]
    # by window: [num_seqs, max_blocks], valid from the window's first block to the last new token's
    block_tables: Mapping[int | None, np.ndarray]
    # the same on the device, int32
    device_rows: Tensor  # [num_tokens] row of the request table each token belongs to
    device_positions: Tensor  # [num_tokens]
    device_blocks: Mapping[int | None, Tensor]  # by window: [rows of the request table, max_blocks]


@dataclass(frozen=True)
class QKNorm:
    """Weights of the norm that a layer's queries and keys pass before they are rotated."""

    q: Tensor  # [head_dim]
    k: Tensor  # [head_dim]
    both: Tensor  # [heads + kv_heads, head_dim]: the two repeated for every head, for one pass over both
    eps: float


@dataclass(frozen=True)
class LayerCache:
    """The paged KV cache of one layer."""

    kv: Tensor  # [k|v, block, kv_head, position_in_block, head_dim]
    scales: Tensor | None = None  # [k|v, block, kv_head, position_in_block] where kv holds 8-bit numbers


class AttentionBackend(Protocol):
    shape: CacheShape
    block_size: int
    plans_on_device: bool  # `decode_step` is there: decodes need nothing from the host

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        """A cache for each layer, with as many blocks as its window's group has."""
        ...

    def prepare(self, geometry: BatchGeometry, upload: Callable[[np.ndarray], Tensor]) -> Any:
        """Whatever all layers of a step share: indices, masks. `upload` sends an array along with the step's others;
        the tensor it returns is filled by the time `forward` runs."""
        ...

    def decode_step(
        self, rows: Tensor, positions: Tensor, *, blocks: Mapping[int | None, Tensor], lengths: Tensor, stream_k: bool
    ) -> Any:
        """In place of `prepare`, a step of decodes alone whose positions only the device knows.

        [n] rows and positions, and the block tables and lengths of all rows; `stream_k` where lengths are `uneven`.
        A position is its row's length - 1, which for padding is -1. The caller writes them after this call and before
        `forward`; where layers read them ahead of that, this call writes them too.
        """
        ...

    def forward(self, qkv: Tensor, norm: QKNorm | None, cache: LayerCache, step: Any, window: int | None) -> Tensor:
        """Norm and rotate queries and keys, store keys and values, attend.

        `qkv` is what the projection gave, [num_tokens, heads + 2 * kv_heads, head_dim], and may be written over.
        Returns [num_tokens, heads * head_dim].
        """
        ...


def uneven(lengths: np.ndarray) -> bool:
    """Whether a few sequences are so much longer than the others that a step would wait for them."""
    return len(lengths) > 0 and lengths.max() * len(lengths) > UNEVEN * max(lengths.sum(), 1)
