"""The ranks of an engine, and the group of one rank alone. collectives.py has the groups of several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.distributed.collectives import ProcessGroup


class Group:
    """One rank alone: its collectives do nothing. `ProcessGroup` is a set of several ranks as seen by one of them."""

    rank = 0
    size = 1

    def in_order(self) -> Group:
        """The same group with an `all_reduce` that adds in the order of ranks: the bits of a sum then depend on its own
        summands alone, not on the shape of the tensor."""
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, written over `x`."""
        return x

    def gather(self, x: Tensor, to: int, dim: int = -1) -> Tensor | None:
        """Concatenate the `x` of all ranks, which have the same shape, along `dim` in the order of ranks. Only rank
        `to` gets the result; the others get None."""
        return x

    def close(self) -> None:
        """Leave the group."""


ALONE = Group()  # has no connection, and nothing in it changes: all engines may share it


@dataclass(frozen=True)
class Rank:
    """One of the workers of an engine. The ranks of a pipeline stage have consecutive indices, stage after stage."""

    index: int = 0  # pipeline_rank * tensor_parallel_size + tensor_rank
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    local_rank: int = 0  # the index of its device on its host

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        return self.index % self.tensor_parallel_size

    @property
    def pipeline_rank(self) -> int:
        return self.index // self.tensor_parallel_size


@dataclass(frozen=True)
class Parallel:
    """A rank and the groups it belongs to."""

    rank: Rank = Rank()
    tensor: Group = ALONE  # ranks with the other shards of the same layers
    pipeline: ProcessGroup | None = None  # ranks with the same shard of the other layers; None = this one alone
    world: ProcessGroup | None = None  # all ranks; None = this one alone

    def close(self) -> None:
        """Leave all groups. Ranks that still wait for this one get an error."""
        for group in (self.tensor, self.pipeline, self.world):
            if group is not None:
                group.close()
