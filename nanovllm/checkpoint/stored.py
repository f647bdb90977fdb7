"""A tensor stored in a checkpoint file, and the destination in memory that it, or a part of it, is loaded into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Part = tuple[slice, ...]  # a slice per leading dimension; the remaining dimensions are complete
Index = tuple[int | slice, ...]  # where in a weight of the model a tensor goes; () is all of it


class Stored(Protocol):
    """A tensor in a checkpoint file that can be read completely or in part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, part: Part = ()) -> Tensor: ...


class Target(Protocol):
    """A weight of the model, which converts checkpoint tensors to its own storage format."""

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        """Read the `part` of a tensor and store it at `index`."""
        ...


@dataclass(frozen=True)
class Slot:
    """The destination of a checkpoint tensor: its `part`, which this rank holds, goes to `index` of `target`."""

    target: Target
    shape: tuple[int, ...]  # of the complete tensor in the checkpoint
    index: Index = ()
    part: Part = ()

    def load(self, tensor: Stored) -> None:
        self.target.load(self.index, tensor, self.part)
