"""Tensors of a GGUF file that Hugging Face's files have in another shape, or as other numbers."""

from collections.abc import Callable
from dataclasses import dataclass

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
