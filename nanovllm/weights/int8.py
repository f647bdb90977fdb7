"""8-bit weights with one scale per output row, made while loading: w = q * scale, q in -127..127, nearest rounding.

Activations stay in the model's dtype. A row's scale comes from the whole row, also where tensor parallel ranks divide
its columns, so that every number of ranks computes with the same weights.

On a GPU a linear's numbers have the order of checkpoint/packed/words.py, and the kernels for packed weights read them.
With experts, float32 activations or a width without such an order, they have the order of columns and other kernels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.packed.words import from_words, to_words, words_on
from nanovllm.checkpoint.stored import Index, Part, Stored

SCALE_BYTES = 4
FEW_ROWS = 8  # up to here reading 8-bit weights in the product costs less than converting them first
COLUMNS = 16  # torch's product with 8-bit weights is wrong for other widths than multiples of this (on Arm: of 8)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., out, in] -> int8 [..., out, in] and float32 scales [..., out]; a row of zeros gets scale 1."""
    weight = weight.float()
    largest = weight.abs().amax(dim=-1)
    scale = torch.where(largest == 0, 1.0, largest / 127)  # NaN stays NaN, for the caller to refuse
    return (weight / scale.unsqueeze(-1)).round_().to(torch.int8), scale


def dequantize_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.float() * scale.unsqueeze(-1)).to(dtype)


class Int8Weight:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.tensor = torch.zeros(shape, dtype=torch.int8, device=device)
        self.scale = torch.ones(shape[:-1], dtype=torch.float32, device=device)
        self._dtype = dtype
        served = len(shape) == 2 and dtype.itemsize == 2
        self.words = words_on(device, 8, shape[-1], shape[-1]) if served else None
        self.format_name = "int8" if self.words is None else "int8_groups"

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        rows, columns = (*part, slice(None), slice(None))[:2]
        if not self.scale[index].numel():
            return
        whole_rows = tensor.read((rows,) if part else ()).to(self.tensor.device)
        # through the model's dtype, so that the stored type of a checkpoint makes no difference
        quantized, scale = quantize_rows(whole_rows.to(self._dtype))
        if not torch.isfinite(scale).all():
            raise ValueError("a row holds NaN or infinity, which 8-bit weights cannot represent")
        self.store(index, quantized[:, columns], scale)

    def store(self, index: Index, codes: Tensor, scale: Tensor) -> None:
        self.tensor[index] = codes if self.words is None else to_words(codes.contiguous(), self.words)
        self.scale[index] = scale

    def finish_loading(self) -> None:
        """Kernels read the weight as it was loaded."""

    def dequantized(self, expert: int | None = None) -> Tensor:
        weight, scale = (self.tensor, self.scale) if expert is None else (self.tensor[expert], self.scale[expert])
        if self.words is not None:
            weight = from_words(weight, self.words)
        return dequantize_rows(weight, scale, self._dtype)

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        few = x.shape[0] <= FEW_ROWS and x.shape[1] % COLUMNS == 0
        if expert is None and few and x.device.type == "cpu" and self.words is None:
            y = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.tensor, self.scale.to(x.dtype))
            return y if bias is None else y + bias
        return F.linear(x, self.dequantized(expert), bias)

    def kernel_arguments(self) -> dict[str, Any]:
        if self.words is not None:
            from nanovllm.kernels.linear.packed import PackedWords

            packed = PackedWords("int8", self.words.distance, self.tensor.view(torch.int32), self.scale.unsqueeze(-1))
            return {"weight": packed}
        return {"weight": self.tensor, "scale": self.scale}


class Int8Format:
    name = "int8"

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return math.prod(shape) + SCALE_BYTES * math.prod(shape[:-1])

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Int8Weight:
        return Int8Weight(shape, dtype, device)
