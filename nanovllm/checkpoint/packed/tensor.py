"""What packed tensors of checkpoints have in common: parts of them, and scales that several weights share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Part


@dataclass(frozen=True)
class InMemory:
    """A tensor that is in memory already; implements `Stored`."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, part: Part = ()) -> Tensor:
        return self.tensor[part]


def spans(part: Part, shape: tuple[int, ...]) -> tuple[range, range]:
    """The rows and columns of a part of a matrix."""
    rows, columns = (*part, slice(None), slice(None))[:2]
    return range(*rows.indices(shape[0])), range(*columns.indices(shape[1]))


def grid_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks down and across a matrix; the last of each may be incomplete."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def take_blocks(
    values: Tensor,  # one value per block of the whole matrix
    block: tuple[int, int],  # rows and columns of a block
    rows: range,
    columns: range,
    smaller: tuple[int, int],
) -> Tensor:
    """The values of a part of a matrix, in blocks of the size `smaller`, which divide `block` and the part's start."""
    row_index = torch.arange(rows.start, rows.stop, smaller[0], device=values.device) // block[0]
    column_index = torch.arange(columns.start, columns.stop, smaller[1], device=values.device) // block[1]
    return values[row_index][:, column_index]


def spread(values: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """One value per element of a matrix, [..., *shape], from one per block."""
    rows, columns = values.shape[-2:]
    whole = values.unsqueeze(-1).unsqueeze(-3).expand(*values.shape[:-2], rows, block[0], columns, block[1])
    return whole.reshape(*values.shape[:-2], rows * block[0], columns * block[1])[..., : shape[0], : shape[1]]


def check_scale(scale: Tensor) -> None:
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise ValueError("a scale is zero, negative, infinite or NaN")
