"""The angles of rotary position embedding, in the half-split form of Hugging Face checkpoints."""

import math

import torch
from torch import Tensor

from nanovllm.layers.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:  # [head_dim / 2]
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "gguf_factors":
        return frequencies / torch.tensor(rope.factors)
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rotary_table(rope: RopeSpec, *, head_dim: int, max_position: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position: [max_position, head_dim] float32."""
    angles = torch.outer(torch.arange(max_position).float(), inverse_frequencies(rope, head_dim))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
