"""A tensor stored in a checkpoint file, and the destination in memory that it, or a part of it, is loaded into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.layers.spec import Weight

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
    """The destination of a checkpoint tensor: parts of it, which this rank holds, go to places in `target`."""

    target: Target
    shape: tuple[int, ...]  # of the complete tensor in the checkpoint
    places: tuple[tuple[Index, Part], ...]
    order: tuple[int, ...] = ()  # where the checkpoint has row i; () = at i
    offset: float | None = None  # added to what the checkpoint has

    def load(self, tensor: Stored) -> None:
        """`tensor`: with its rows in the model's order and the offset added."""
        for index, part in self.places:
            self.target.load(index, tensor, part)


def slots_of(spec: Weight, target: Target, rank: int = 0, num_ranks: int = 1) -> dict[str, Slot]:
    """Where the tensors of a parameter go in the weight that this rank holds, by their names in checkpoints."""
    found: dict[str, Slot] = {}
    for part in spec.parts(rank, num_ranks):
        others = found[part.name].places if part.name in found else ()
        found[part.name] = Slot(target, part.shape, (*others, (part.index, part.part)), part.order, spec.offset)
    return found
