"""4-bit floating point weights (e2m1) with a scale per group of columns: MXFP4 and NVFP4.

The layout is that of checkpoint/packed/fp4.py. Inputs stay in the model's dtype (W4A16), also where a checkpoint was
made for rounded inputs; the weight is dequantized in float32 and rounded to it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.fp4 import Fp4Pieces, dequantize, quantize_fp4
from nanovllm.checkpoint.packed.words import from_words, to_words, words_on
from nanovllm.checkpoint.stored import Index, Part, Stored
from nanovllm.weights.forms import Fp4Form
from nanovllm.weights.tiles import matmul_by_tiles

LARGEST_EXPONENT = 160  # of an MXFP4 scale (e8m0), by `scaled_fp4` of kernels/linear/packed.py


class Fp4Weight:
    def __init__(self, form: "Fp4Format", shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.format_name, self.shape = form.name, shape
        self.group = form.group_of(shape)
        tensors = form.tensors(shape).items()
        held: dict[str, Any] = {name: torch.zeros(one, dtype=kind, device=device) for name, (one, kind) in tensors}
        self.pieces = Fp4Pieces(**({"unit": None} | held))
        self._form, self._dtype = form, dtype
        self.words = words_on(device, 4, shape[-1], self.group, True)

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        if not self.pieces.codes[index].numel():
            return
        source: Any = tensor
        if getattr(tensor, "form", None) != self._form.form:
            if not self._form.quantizes:
                raise ValueError("the config says that it is stored in fp4, but the file holds it unpacked")
            source = quantize_fp4(tensor.read().to(self.pieces.codes.device, self._dtype), self._form.form)
        read: Fp4Pieces = source.pieces(part, self.group, self.pieces.codes.device)
        if self.words is not None:
            if read.scale.dtype == torch.uint8 and read.scale.numel() and read.scale.max() > LARGEST_EXPONENT:
                raise ValueError("its scales are larger than 2^33, which the kernels do not support")
            read = read._replace(codes=to_words(read.codes, self.words))
        for held, new in zip(self.pieces, read, strict=True):
            if held is not None and new is not None:
                held[index] = new

    def finish_loading(self) -> None:
        """Read as it was loaded."""

    def dequantized(self, expert: int | None = None, rows: slice = slice(None)) -> Tensor:
        """In float32."""
        codes, scale, unit = (one if expert is None or one is None else one[expert] for one in self.pieces)
        assert codes is not None and scale is not None
        codes = codes[..., rows, :] if self.words is None else from_words(codes[..., rows, :], self.words)
        own = Fp4Pieces(codes, scale[..., rows, :], None if unit is None else unit[..., rows])
        return dequantize(own, self.group)

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        shape = (self.shape[-2], self.shape[-1])
        y = matmul_by_tiles(x, shape, lambda rows: self.dequantized(expert, rows).to(x.dtype))
        return y if bias is None else y + bias

    def kernel_arguments(self) -> dict[str, Any]:
        if self.words is not None:
            from nanovllm.kernels.linear.packed import PackedWords

            codes, scale, unit = self.pieces
            unit = None if unit is None else unit.unsqueeze(-1)
            return {"weight": PackedWords("fp4", self.words.distance, codes.view(torch.int32), scale, scale_unit=unit)}
        named = zip(("weight", "scale", "unit"), self.pieces, strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}


class Fp4Format:
    def __init__(self, form: Fp4Form, *, start: int, quantizes: bool) -> None:
        """`start`: a number of columns that divides the begin of every rank's part of a checkpoint tensor.
        `quantizes`: tensors that are not in fp4 yet are rounded; otherwise they are refused."""
        self.name = "nvfp4" if form.has_unit else "mxfp4"
        self.form, self.quantizes = form, quantizes
        self._start = start

    def group_of(self, shape: tuple[int, ...]) -> int:
        return self.form.group_in(self._start, shape[-1])

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each of the `Fp4Pieces` of a weight."""
        kind = torch.float8_e4m3fn if self.form.has_unit else torch.uint8
        found = {
            "codes": ((*shape[:-1], shape[-1] // 2), torch.uint8),
            "scale": ((*shape[:-1], shape[-1] // self.group_of(shape)), kind),
        }
        return found | {"unit": (shape[:-1], torch.float32)} if self.form.has_unit else found

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return sum(math.prod(one) * dtype.itemsize for one, dtype in self.tensors(shape).values())

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Fp4Weight:
        return Fp4Weight(self, shape, dtype, device)
