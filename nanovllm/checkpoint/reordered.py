"""A checkpoint tensor whose rows are read in another order, or whose numbers are read with something added."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Part, Stored


@dataclass(frozen=True)
class Reordered:
    """Implements `Stored`."""

    tensor: Stored
    order: Sequence[int]  # where the tensor has row i

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self, part: Part = ()) -> Tensor:
        rows, *columns = part or (slice(None),)
        wanted = torch.tensor(self.order[rows])
        if not len(wanted):
            return self.tensor.read(part)
        first, last = int(wanted.min()), int(wanted.max())
        read = self.tensor.read((slice(first, last + 1), *columns))
        return read[(wanted - first).to(read.device)]


@dataclass(frozen=True)
class Shifted:
    """Implements `Stored`."""

    tensor: Stored
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self, part: Part = ()) -> Tensor:
        return self.tensor.read(part).float() + self.offset


def reorder(tensor: Any, order: Sequence[int]) -> Stored:
    """A packed tensor stays packed."""
    packed = getattr(tensor, "with_rows", None)
    return Reordered(tensor, order) if packed is None else packed(order)
