"""8-bit floating point weights (e4m3) with a float32 scale per row or per block: w = q * scale.

The product rounds its inputs to e4m3 too (W8A8), with scales of their own: one per token where weights have one per
row, and one per token and block of columns where weights have one per block. Scales of inputs that a checkpoint holds
(`input_scale`) are not needed. The numbers of both factors are exact in float32, so the product below differs from that
of fp8 tensor cores by the rounding of scales and sums alone. A checkpoint may say that inputs are not rounded (W8A16).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.packed.fp8 import LARGEST, Fp8Tensor, quantize_fp8
from nanovllm.checkpoint.packed.tensor import grid_shape, spread
from nanovllm.checkpoint.packed.words import from_words, to_words, words_on
from nanovllm.checkpoint.stored import Index, Part, Stored
from nanovllm.weights.forms import Fp8Form
from nanovllm.weights.tiles import matmul_by_tiles


def round_inputs(x: Tensor, group: int) -> Tensor:
    """Round [rows, in] to fp8 with one scale per row and `group` columns, and back to float32."""
    columns = x.shape[1]
    padded = F.pad(x.float(), (0, -columns % group)).unflatten(1, (-1, group))
    largest = padded.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / LARGEST)
    codes = (padded / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(1)[:, :columns]


class Fp8Weight:
    def __init__(self, form: "Fp8Format", shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.format_name = form.name
        self.shape = shape
        self.block = form.block_of(shape)
        self.tensor = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)  # [..., out, in]
        self.scale = torch.ones(*shape[:-2], *grid_shape(shape[-2:], self.block), device=device)  # one per block
        self._form, self._dtype = form, dtype
        served = shape[-1] % self.block[1] == 0 and (len(shape) == 2 or shape[-2] % self.block[0] == 0)
        self.words = words_on(device, 8, shape[-1], self.block[1]) if served else None

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        here = self.tensor[index]
        if not here.numel():
            return
        if not isinstance(tensor, Fp8Tensor) or tensor.block != self._form.stored_block:
            if not self._form.quantizes:
                raise ValueError("the config says that it is stored in fp8, but the file has no scale for it")
            tensor = quantize_fp8(tensor.read().to(here.device, self._dtype), self._form.stored_block)
        codes, scale = tensor.pieces(part, self.block, here.device)
        if self.words is not None:
            codes = to_words(codes, self.words)
        here.view(torch.uint8).copy_(codes.view(torch.uint8))
        *expert, rows = index
        assert isinstance(rows, slice)
        first = rows.start // self.block[0]
        self.scale[(*expert, slice(first, first + scale.shape[0]))] = scale

    def finish_loading(self) -> None:
        """Read as it was loaded."""

    def dequantized(self, expert: int | None = None, rows: slice = slice(None)) -> Tensor:
        """In float32. `rows` must begin with a block."""
        codes, scale = (self.tensor, self.scale) if expert is None else (self.tensor[expert], self.scale[expert])
        codes = codes[..., rows, :]
        if self.words is not None:
            codes = from_words(codes, self.words)
        first = (rows.start or 0) // self.block[0]
        scale = scale[..., first : first + -(-codes.shape[-2] // self.block[0]), :]
        return codes.float() * spread(scale, self.block, (codes.shape[-2], codes.shape[-1]))

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        inputs = round_inputs(x, self.block[1]) if self._form.rounds_inputs else x.float()
        shape = (self.shape[-2], self.shape[-1])
        y = matmul_by_tiles(inputs, shape, lambda rows: self.dequantized(expert, rows), multiple_of=self.block[0])
        return (y if bias is None else y + bias).to(x.dtype)

    def kernel_arguments(self) -> dict[str, Any]:
        if self.words is not None:
            from nanovllm.kernels.linear.packed import PackedWords

            rounds, words = self._form.rounds_inputs, self.tensor.view(torch.int32)
            packed = PackedWords("fp8", self.words.distance, words, self.scale, self.block[0], rounds_inputs=rounds)
            return {"weight": packed}
        return {"weight": self.tensor, "scale": self.scale}


class Fp8Format:
    def __init__(self, form: Fp8Form, *, starts: tuple[int, int] = (0, 0), quantizes: bool = True) -> None:
        """`starts`: numbers of rows and columns that divide the begin of every rank's part of a checkpoint tensor.
        `quantizes`: tensors that are not in fp8 yet are rounded; otherwise they are refused."""
        self.name = "fp8" if form.block is None else "fp8_block"
        self.stored_block = form.block
        self.rounds_inputs = form.rounds_inputs
        self.quantizes = quantizes
        self._starts = starts

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale: the checkpoint's blocks, cut where parts begin within one."""
        if self.stored_block is None:
            return 1, shape[-1]
        rows, columns = (math.gcd(size, start) for size, start in zip(self.stored_block, self._starts, strict=True))
        return rows, columns

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        down, across = grid_shape(shape[-2:], self.block_of(shape))
        return math.prod(shape) + 4 * math.prod(shape[:-2]) * down * across

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self, shape, dtype, device)
