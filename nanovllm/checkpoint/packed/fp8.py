"""Tensors of 8-bit floating point numbers (e4m3) with a scale per block, per row or for all: w = q * scale."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.tensor import (
    InMemory,
    check_floats,
    check_scale,
    grid_shape,
    spans,
    spread,
    take_blocks,
)
from nanovllm.checkpoint.reordered import Reordered
from nanovllm.checkpoint.stored import Part, Stored

LARGEST = 448.0  # of e4m3


@dataclass(frozen=True)
class Fp8Tensor:
    """A weight, [out, in], and its scales; implements `Stored`."""

    weight: Stored
    scale: Stored  # one number, [out], [out, 1], or one per block
    block: tuple[int, int] | None  # rows and columns that share a scale; None = a scale per row, or one for all

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self, part: Part = ()) -> Tensor:
        """Dequantized, in float32."""
        rows, columns = spans(part, self.shape)
        grid = (1, len(columns))
        if self.block is not None:
            grid = (1, 1)
        codes, scale = self.pieces(part, grid, torch.device("cpu"))
        return codes.float() * spread(scale, grid, (len(rows), len(columns)))

    def pieces(self, part: Part, grid: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers of a part, and its scales in blocks of the size `grid`, in float32."""
        rows, columns = spans(part, self.shape)
        codes = self.weight.read(part).to(device)
        if codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"the weight's type is {codes.dtype}, and its scales are those of float8_e4m3fn")
        if codes.numel() and (codes.view(torch.uint8) & 0x7F).amax() == 0x7F:
            raise ValueError("a weight is NaN")
        scale = check_floats(self.scale.read(), "scales").to(device, torch.float32)
        block = self.block
        if block is None:
            block = (self.shape[0] if scale.numel() == 1 else 1, self.shape[1])
            scale = scale.reshape(-1, 1)
        if tuple(scale.shape) != grid_shape(self.shape, block):
            expected = list(grid_shape(self.shape, block))
            raise ValueError(f"the scales have shape {list(scale.shape)}, and {expected} is needed")
        check_scale(scale)
        return codes, take_blocks(scale, block, rows, columns, grid)

    def with_rows(self, order: Sequence[int]) -> "Fp8Tensor":
        """With the row of number `order[i]` at i."""
        scale = self.scale
        if self.block is None:
            scale = scale if math.prod(scale.shape) == 1 else Reordered(scale, order)
        elif any(row // self.block[0] != index // self.block[0] for index, row in enumerate(order)):
            raise ValueError(f"its rows must be reordered, and blocks of {self.block[0]} rows share a scale")
        return Fp8Tensor(Reordered(self.weight, order), scale, self.block)


def quantize_fp8(weight: Tensor, block: tuple[int, int] | None) -> Fp8Tensor:
    """Round [out, in] to fp8; a block's, or row's, largest number becomes 448, and one of zeros gets scale 1."""
    size = (1, weight.shape[1]) if block is None else block
    weight = weight.float()
    down, across = grid_shape(tuple(weight.shape), size)
    padded = weight.new_zeros(down * size[0], across * size[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = padded.view(down, size[0], across, size[1]).abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise ValueError("it holds NaN or infinity, which fp8 weights cannot represent")
    scale = torch.where(largest == 0, 1.0, largest / LARGEST)
    codes = (weight / spread(scale, size, (weight.shape[0], weight.shape[1]))).to(torch.float8_e4m3fn)
    return Fp8Tensor(InMemory(codes), InMemory(scale), block)
