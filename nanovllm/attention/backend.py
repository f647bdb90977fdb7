"""What attention backends are given: shapes, the sequences of a step, the cache of a layer and how it attends."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    num_sampled: np.ndarray  # [num_seqs] the last so many of them have a token sampled after each
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
    sinks: Tensor | None = None  # [heads]: a logit of each that takes part in the softmax and adds nothing


@dataclass(frozen=True)
class LayerCache:
    """The paged KV cache of one layer."""

    kv: Tensor  # [k|v, block, kv_head, position_in_block, head_dim]
    scales: Tensor | None = None  # [k|v, block, kv_head, position_in_block] if kv holds 8-bit numbers
