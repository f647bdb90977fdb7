"""Rotary position embedding, in the half-split form of Hugging Face checkpoints."""

import math

import torch
from torch import Tensor

from nanovllm.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:  # [head_dim / 2]
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "gguf_factors":
        return frequencies / torch.tensor(rope.factors)
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


class RotaryEmbedding:
    """Cosines and sines of every position, once; a step gathers its rows and all layers share them.

    Queries, keys and values of a token lie side by side, and all are rotated in one pass: the values by an angle of 0.
    """

    def __init__(
        self,
        rope: RopeConfig,
        *,
        num_rotated: int,  # heads of queries and keys
        num_kept: int,  # heads of values
        head_dim: int,
        max_position: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        angles = torch.outer(torch.arange(max_position).float(), inverse_frequencies(rope, head_dim))
        cos, sin = angles.cos(), angles.sin()
        # rotate_half(x) = roll(x) with the first half negated: the sign sits in the sine
        self._cos = torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype)  # [max_position, head_dim]
        self._sin = torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype)

        self._num_rotated = num_rotated
        self._kept_cos = torch.ones(1, num_kept, head_dim, dtype=dtype, device=device)
        self._kept_sin = torch.zeros(1, num_kept, head_dim, dtype=dtype, device=device)

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
