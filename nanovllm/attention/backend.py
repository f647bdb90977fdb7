"""The interface of attention backends. `sdpa.py` is the plain implementation that the others are tested against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    windows: tuple[int | None, ...]  # of each layer; layers with equal windows share a block table
    dtype: torch.dtype  # of activations
    cache_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class BatchGeometry:
    """The sequences of one step and their tokens. Decodes (one token each) come first, then prefill chunks."""

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


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """How one layer attends. With norms, queries and keys are normalized before they are rotated."""

    scale: float  # of the scores before the softmax
    window: int | None = None  # positions a token attends to, itself included; None = all
    rope: int = 0  # which of the backend's rotary tables
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None
    both_norms: Tensor | None = None  # [heads + kv_heads, head_dim]: repeated, so that one operation does both
    norm_eps: float = 0.0


@dataclass(frozen=True)
class LayerCache:
    """The paged KV cache of one layer."""

    kv: Tensor  # [k|v, block, kv_head, position_in_block, head_dim]
    scales: Tensor | None = None  # [k|v, block, kv_head, position_in_block] if kv holds 8-bit numbers


class AttentionBackend(Protocol):
    shape: CacheShape
    block_size: int
    plans_on_device: bool  # it is a `DeviceBackend`

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        """A cache for each layer, with as many blocks as its window's group has."""
        ...

    def prepare(self, geometry: BatchGeometry, upload: Callable[[np.ndarray], Tensor]) -> Any:
        """Prepare what all layers of a step use, such as indices and masks.

        `upload` copies an array to the device together with the step's other arrays; the tensor that it returns is
        filled when `forward` runs.
        """
        ...

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: Any) -> Tensor:
        """Normalize and rotate queries and keys, store keys and values in the cache, and attend.

        `qkv` is the output of the projection, [num_tokens, heads + 2 * kv_heads, head_dim], and may be overwritten.
        `step` comes from `prepare` or `decode_step`. Returns [num_tokens, heads * head_dim].
        """
        ...
