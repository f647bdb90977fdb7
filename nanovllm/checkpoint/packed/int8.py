"""Tensors of 8-bit integers with a scale per row, or one for all: w = q * scale."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.tensor import check_floats, check_scale, spans
from nanovllm.checkpoint.reordered import Reordered
from nanovllm.checkpoint.stored import Part, Stored


@dataclass(frozen=True)
class Int8Tensor:
    """A weight, [out, in], and its scales; implements `Stored`."""

    weight: Stored
    scale: Stored  # one number, [out] or [out, 1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self, part: Part = ()) -> Tensor:
        """Dequantized, in float32."""
        codes, scale = self.pieces(part, torch.device("cpu"))
        return codes.float() * scale.unsqueeze(-1)

    def pieces(self, part: Part, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers of a part, and the float32 scale of each of its rows."""
        rows, _ = spans(part, self.shape)
        codes = self.weight.read(part).to(device)
        if codes.dtype != torch.int8:
            raise ValueError(f"the weight's type is {codes.dtype}, and int8 is needed")
        scale = check_floats(self.scale.read(), "scales").to(device, torch.float32).flatten()
        if scale.numel() not in (1, self.shape[0]):
            raise ValueError(f"there are scales for {scale.numel()} rows, and {self.shape[0]} are needed")
        check_scale(scale)
        return codes, scale.expand(self.shape[0])[rows.start : rows.stop]

    def with_rows(self, order: Sequence[int]) -> "Int8Tensor":
        """With the row of number `order[i]` at i."""
        scale = self.scale if math.prod(self.scale.shape) == 1 else Reordered(self.scale, order)
        return Int8Tensor(Reordered(self.weight, order), scale)
