"""What packed tensors of checkpoints have in common: parts of them, and scales that several weights share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Part, Stored


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


def taken(found: dict[str, Stored], name: str, num_dims: int) -> Stored:
    """The tensor of this name, which `found` loses. It must have so many dimensions."""
    if name not in found:
        raise ValueError(f"{name} is missing")
    tensor = found.pop(name)
    if len(tensor.shape) != num_dims:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, and {num_dims} dimensions are needed")
    return tensor


def check_floats(numbers: Tensor, what: str) -> Tensor:
    if not numbers.is_floating_point():
        raise ValueError(f"{what} are {numbers.dtype}, and floating point numbers are needed")
    return numbers


def check_scale(scale: Tensor, *, may_be_negative: bool = False) -> None:
    if not (torch.isfinite(scale) & ((scale != 0) if may_be_negative else (scale > 0))).all():
        raise ValueError(f"a scale is zero, {'' if may_be_negative else 'negative, '}infinite or NaN")
