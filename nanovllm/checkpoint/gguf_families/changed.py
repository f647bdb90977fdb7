"""Tensors of a GGUF file that Hugging Face's files have in another shape, or as other numbers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Part, Stored


@dataclass(frozen=True)
class Changed:
    """Implements `Stored`. The whole tensor is read for each part: for small ones."""

    tensor: Stored
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor]

    def read(self, part: Part = ()) -> Tensor:
        return self.change(self.tensor.read())[part]


def as_filters(taps: Stored) -> Changed:
    """[channels, taps] of a convolution as [channels, 1, taps]."""
    channels, size = taps.shape
    return Changed(taps, (channels, 1, size), lambda read: read.unsqueeze(1))


@dataclass(frozen=True)
class KeysAndValues:
    """DeepSeek's kv_b_proj, [heads * (key size + value size), latent size]; implements `Stored`."""

    keys: Stored  # [heads, latent size, key size]
    values: Stored  # [heads, value size, latent size]

    @property
    def shape(self) -> tuple[int, ...]:
        heads, latent, size = self.keys.shape
        return heads * (size + self.values.shape[1]), latent

    def read(self, part: Part = ()) -> Tensor:
        return torch.cat([self.keys.read().transpose(1, 2), self.values.read()], dim=1).flatten(0, 1)[part]
