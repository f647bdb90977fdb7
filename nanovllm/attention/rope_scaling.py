"""Rotary frequencies of models whose context was extended after training."""

import math

import torch
from torch import Tensor

from nanovllm.layers.spec import RopeSpec


def scaled_frequencies(frequencies: Tensor, rope: RopeSpec) -> Tensor:  # [head_dim / 2]
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "gguf_factors":
        return frequencies / torch.tensor(rope.factors)
    assert rope.rope_type == "llama3", rope
    return _llama3(frequencies, rope)


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
