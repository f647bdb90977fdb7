"""Rotary position embedding in the half-split form of Hugging Face checkpoints, and the norm of queries and keys.

Queries, keys and values of a token are adjacent in one tensor. One operation rotates all of them: values by angle 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import CacheShape
from nanovllm.layers.spec import RopeSpec


def rotary_table(rope: RopeSpec, *, head_dim: int, max_position: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position: [max_position, head_dim] float32."""
    rotated = rope.rotated_dim or head_dim
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated)
    amplitude = 1.0
    if rope.scaling is not None:
        from nanovllm.attention.rope_scaling import scaled_frequencies

        frequencies, amplitude = scaled_frequencies(frequencies, rope, max_position=max_position)
    angles = torch.outer(torch.arange(max_position).float(), frequencies)  # [max_position, rotated / 2]
    kept = (0, (head_dim - rotated) // 2)
    cos, sin = F.pad(angles.cos() * amplitude, kept, value=1.0), F.pad(angles.sin() * amplitude, kept)
    return torch.cat([cos, sin], dim=-1).to(device)


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


def norm_heads(qkv: Tensor, weights: Tensor, eps: float) -> Tensor:  # [num_tokens, heads of q, k, v, head_dim]
    """`weights`: [heads of q and k, head_dim]; values are kept as they are."""
    num_normed = weights.shape[0]
    normed = F.rms_norm(qkv[:, :num_normed].to(weights.dtype), (qkv.shape[-1],), None, eps) * weights
    return torch.cat([normed.to(qkv.dtype), qkv[:, num_normed:]], dim=1)
