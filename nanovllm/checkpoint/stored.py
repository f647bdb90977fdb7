"""A tensor that still lies in its file, and the place in memory that takes it, or a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Part = tuple[slice, ...]  # of the first dimensions; those not named are whole
Index = tuple[int | slice, ...]


class Stored(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, part: Part = ()) -> Tensor: ...


class Target(Protocol):
    """A weight in memory that knows how to store what a file holds."""

    def load(self, index: Index, tensor: Stored, part: Part) -> None: ...


@dataclass(frozen=True)
class Slot:
    """The place `index` in `target`, which takes the `part` of a checkpoint tensor that is held here."""

    target: Target
    shape: tuple[int, ...]  # of the whole tensor
    index: Index = ()
    part: Part = ()

    def load(self, tensor: Stored) -> None:
        self.target.load(self.index, tensor, self.part)
