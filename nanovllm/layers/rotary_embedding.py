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
    """Cosines and sines of every position, once; a step gathers its rows and all layers share them."""

    def __init__(
        self, rope: RopeConfig, *, head_dim: int, max_position: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(max_position).float(), inverse_frequencies(rope, head_dim))
        cos, sin = angles.cos(), angles.sin()
        # rotate_half(x) = roll(x) with the first half negated: the sign sits in the sine
        self._cos = torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype)  # [max_position, head_dim]
        self._sin = torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype)

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # two of [num_tokens, 1, head_dim]
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:  # [num_tokens, heads, head_dim]
    cos, sin = cos_sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
