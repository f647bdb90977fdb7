"""Tensors of a GGUF file that Hugging Face's files have in another shape, or as other numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nanovllm.checkpoint.stored import Part, Stored


@dataclass(frozen=True)
class Changed:
    """Implements `Stored`. The whole tensor is read for each part: for small ones."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    def read(self, part: Part = ()) -> Tensor:
        return self.make()[part]


def as_filters(taps: Stored) -> Changed:
    """[channels, taps] of a convolution as [channels, 1, taps]."""
    channels, size = taps.shape
    return Changed((channels, 1, size), lambda: taps.read().unsqueeze(1))
