"""What an attention implementation must offer; `sdpa.py` is the plain one that all others are tested against."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchGeometry:
    """Who attends to what in one step, on the host. Decodes (one token each) come first, then prefill chunks."""

    num_decodes: int
    starts: np.ndarray  # [num_seqs] position of each sequence's first new token
    num_new: np.ndarray  # [num_seqs] new tokens; 1 for decodes
    first_tokens: np.ndarray  # [num_seqs] index of the sequence's first new token among the step's tokens
    token_seqs: np.ndarray  # [num_tokens] which sequence each token belongs to
    positions: np.ndarray  # [num_tokens]
    block_tables: np.ndarray  # [num_seqs, max_blocks] valid as far as start + num_new reaches


class AttentionBackend(Protocol):
    block_size: int

    def make_cache(self, num_blocks: int) -> list[Tensor]:
        """The paged KV cache, one tensor a layer: [k|v, block, kv_head, position_in_block, head_dim]."""
        ...

    def prepare(self, geometry: BatchGeometry) -> Any:
        """Whatever all layers of a step share: indices, masks."""
        ...

    def forward(self, qkv: Tensor, cache: Tensor, step: Any, window: int | None) -> Tensor:
        """Store keys and values of qkv, [num_tokens, heads + 2 * kv_heads, head_dim], and attend with its queries.

        Returns [num_tokens, heads * head_dim].
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype  # the model computes in
    cache_dtype: torch.dtype
    device: torch.device
