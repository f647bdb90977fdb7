"""A tensor that still lies in its file, and the place in memory that takes it, or a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Part = tuple[slice, ...]  # of the first dimensions; those not named are whole


class Stored(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, part: Part = ()) -> Tensor: ...


@dataclass(frozen=True)
class Slot:
    """`view` takes the `part` of a tensor that is held here."""

    view: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    part: Part = ()

    @classmethod
    def whole(cls, view: Tensor) -> Slot:
        return cls(view, tuple(view.shape))
