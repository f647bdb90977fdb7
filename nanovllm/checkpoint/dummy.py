"""Random weights in place of a checkpoint, for benchmarks and tests."""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Part, Slot


def load_dummy(slots: dict[str, Slot], seed: int, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill each slot with values of a size that keeps activations sane; norms are 1, biases 0."""
    generator = torch.Generator(device)
    for name, slot in slots.items():
        slot.load(_Dummy(name, slot.shape, seed, dtype, generator))


@dataclass(frozen=True)
class _Dummy:
    """A tensor's values depend on its name and its whole shape, so every rank holds a part of the same model."""

    name: str
    shape: tuple[int, ...]
    seed: int
    dtype: torch.dtype
    generator: torch.Generator

    def read(self, part: Part = ()) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.generator.device)
        if len(self.shape) == 1:
            return tensor.fill_(0.0 if self.name.endswith(".bias") else 1.0)[part]
        self.generator.manual_seed(zlib.crc32(f"{self.seed} {self.name}".encode()))
        return tensor.normal_(0.0, 0.02, generator=self.generator)[part]
