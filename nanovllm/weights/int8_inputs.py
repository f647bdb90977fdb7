"""8-bit weights with one scale per row that a checkpoint holds, and inputs rounded to 8 bits per token (W8A8).

The product of the integers is a float32 sum: a kernel that sums integers differs from it by float32 rounding. A
checkpoint may say that inputs are not rounded (W8A16): then the weight is the same as one of `quantization="int8"`.
"""

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.int8 import Int8Tensor
from nanovllm.checkpoint.stored import Index, Part, Stored
from nanovllm.weights.forms import Int8Form
from nanovllm.weights.int8 import Int8Format, Int8Weight
from nanovllm.weights.tiles import matmul_by_tiles


def quantize_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, in] -> integers from -127 to 127 in float32, and one scale per row, [rows, 1]."""
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / 127)
    return (x / scale).round(), scale


class Int8InputsWeight(Int8Weight):
    def __init__(self, form: "Int8InputsFormat", shape: tuple[int, ...], dtype: torch.dtype, on: torch.device) -> None:
        super().__init__(shape, dtype, on)
        self._form = form
        if form.rounds_inputs:
            self.format_name, self.words = form.name, None

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        if not isinstance(tensor, Int8Tensor):
            if not self._form.quantizes:
                raise ValueError("the config says that it is stored in int8, but the file has no scale for it")
            super().load(index, tensor, part)
        elif self.scale[index].numel():
            codes, scale = tensor.pieces(part, self.tensor.device)
            self.store(index, codes, scale)

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        if not self._form.rounds_inputs:
            return super().matmul(x, bias, expert)
        tensor, scale = (self.tensor, self.scale) if expert is None else (self.tensor[expert], self.scale[expert])
        inputs, input_scale = quantize_inputs(x)
        shape = (self.shape[-2], self.shape[-1])
        y = matmul_by_tiles(inputs, shape, lambda rows: tensor[rows].float()) * input_scale * scale
        return (y if bias is None else y + bias).to(x.dtype)


class Int8InputsFormat(Int8Format):
    def __init__(self, form: Int8Form, *, quantizes: bool) -> None:
        self.name = "int8_inputs" if form.rounds_inputs else "int8"
        self.rounds_inputs, self.quantizes = form.rounds_inputs, quantizes

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Int8InputsWeight:
        return Int8InputsWeight(self, shape, dtype, device)
