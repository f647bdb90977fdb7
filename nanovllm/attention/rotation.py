"""Norm and rotary embedding of queries and keys in plain torch.

Queries, keys and values of a token are adjacent in one tensor. One operation rotates all of them: values by angle 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import CacheShape, QKNorm


class Rotation:
    def __init__(self, shape: CacheShape, table: Tensor) -> None:  # [max_position, head_dim]: cosines, then sines
        cos, sin = table.chunk(2, dim=-1)
        # rotate_half(x) is roll(x) with the first half negated; the sign is put into the sine
        self._cos = torch.cat([cos, cos], dim=-1).to(shape.dtype)  # [max_position, head_dim]
        self._sin = torch.cat([-sin, sin], dim=-1).to(shape.dtype)
        self._num_rotated = shape.num_heads + shape.num_kv_heads
        kept = (1, shape.num_kv_heads, shape.head_dim)
        self._kept_cos = torch.ones(kept, dtype=shape.dtype, device=shape.device)
        self._kept_sin = torch.zeros(kept, dtype=shape.dtype, device=shape.device)

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # two of [num_tokens, heads of q, k, v, head_dim]
        return (
            self._widen(self._cos.index_select(0, positions), self._kept_cos),
            self._widen(self._sin.index_select(0, positions), self._kept_sin),
        )

    def _widen(self, rotated: Tensor, kept: Tensor) -> Tensor:
        num_tokens = rotated.shape[0]
        rotated = rotated.unsqueeze(1).expand(-1, self._num_rotated, -1)
        return torch.cat([rotated, kept.expand(num_tokens, -1, -1)], dim=1)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:  # [num_tokens, heads of q, k, v, head_dim]
    cos, sin = cos_sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def norm_heads(qkv: Tensor, norm: QKNorm) -> Tensor:  # [num_tokens, heads of q, k, v, head_dim]
    num_normed = norm.both.shape[0]
    normed = F.rms_norm(qkv[:, :num_normed], (qkv.shape[-1],), None, norm.eps) * norm.both
    return torch.cat([normed, qkv[:, num_normed:]], dim=1)
