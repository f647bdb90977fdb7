"""A tensor stored in a checkpoint file, and the destination in memory that it, or a part of it, is loaded into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Part = tuple[slice, ...]  # a slice per leading dimension; the remaining dimensions are complete


class Stored(Protocol):
    """A tensor in a checkpoint file that can be read completely or in part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, part: Part = ()) -> Tensor: ...


@dataclass(frozen=True)
class Slot:
    """The destination of a checkpoint tensor: its `part` is copied into `view`."""

    view: Tensor
    shape: tuple[int, ...]  # of the complete tensor in the checkpoint
    part: Part = ()

    @classmethod
    def whole(cls, view: Tensor) -> Slot:
        """The destination of a tensor that is loaded completely."""
        return cls(view, tuple(view.shape))
