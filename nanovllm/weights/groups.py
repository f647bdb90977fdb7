"""4- and 8-bit integer weights with a scale per group of columns: w = (q - zero) * scale, or w = q * scale - minimum.

One form for AWQ, GPTQ, compressed-tensors and GGUF, in the layout that checkpoint/packed/groups.py describes. Inputs
stay in the model's dtype (W4A16, W8A16); the weight is dequantized in float32 and rounded to it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.groups import Pieces, dequantize, quantize_groups
from nanovllm.checkpoint.packed.words import from_words, to_words, words_on
from nanovllm.checkpoint.stored import Index, Part, Stored
from nanovllm.weights.forms import GroupForm
from nanovllm.weights.tiles import matmul_by_tiles


class GroupWeight:
    def __init__(self, form: "GroupFormat", shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.format_name, self.shape = form.name, shape
        self.sizes = form.sizes_of(shape)  # columns that share a scale, and a unit
        tensors = form.tensors(shape)
        self.pieces = Pieces(
            **{name: torch.zeros(one, dtype=kind, device=device) for name, (one, kind) in tensors.items()}
        )
        self._form, self._dtype = form, dtype
        zero = self.pieces.zero  # kernels read four at once
        served = not form.form.ordered and (zero is None or zero.shape[-2] * zero.shape[-1] % 4 == 0)
        self.words = words_on(device, form.form.bits, shape[-1], self.sizes[0]) if served else None

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        if not self.pieces.codes[index].numel():
            return
        source: Any = tensor
        if getattr(tensor, "form", None) != self._form.form:
            if not self._form.quantizes:
                bits = self._form.form.bits
                raise ValueError(f"the config says that it has {bits} bits, but the file holds it unpacked")
            source = quantize_groups(tensor.read().to(self.pieces.codes.device, self._dtype), self._form.form)
        read = source.pieces(part, self.sizes, self.pieces.codes.device)
        for name, held, new in zip(Pieces._fields, self.pieces, read, strict=True):
            if held is not None:
                if name == "codes" and self.words is not None:
                    new = to_words(new, self.words)
                here = held[index[:-1] if name == "order" else index]
                here.copy_(new)
                if here.dtype != new.dtype and not torch.equal(here.float(), new.float()):
                    raise ValueError(f"its scales are {new.dtype}, and those of other weights {here.dtype}")

    def finish_loading(self) -> None:
        """Read as it was loaded."""

    def dequantized(self, expert: int | None = None, rows: slice = slice(None)) -> Tensor:
        """In float32."""
        own = {}
        for name, held in zip(Pieces._fields, self.pieces, strict=True):
            if held is not None:
                one = held if expert is None else held[expert]
                own[name] = one if name == "order" else one[..., rows, :]
        if self.words is not None:
            own["codes"] = from_words(own["codes"], self.words)
        return dequantize(Pieces(**own), self._form.form, self.sizes)

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        shape = (self.shape[-2], self.shape[-1])
        y = matmul_by_tiles(x, shape, lambda rows: self.dequantized(expert, rows).to(x.dtype))
        return y if bias is None else y + bias

    def kernel_arguments(self) -> dict[str, Any]:
        if self.words is not None:
            from nanovllm.kernels.linear.packed import PackedWords

            codes, scale, zero, minimum, _, scale_unit, minimum_unit = self.pieces
            return {
                "weight": PackedWords(
                    f"int{self.words.bits}",
                    self.words.distance,
                    codes.view(torch.int32),
                    scale,
                    zero=zero,
                    minimum=minimum,
                    scale_unit=scale_unit,
                    minimum_unit=minimum_unit,
                )
            }
        named = zip(("weight", *Pieces._fields[1:]), self.pieces, strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}


class GroupFormat:
    def __init__(self, form: GroupForm, *, columns: int, start: int = 0, quantizes: bool = True) -> None:
        """`columns`: of the whole weight. `start`: a number of columns that divides the begin of every rank's part.
        `quantizes`: tensors that are not packed yet are rounded; otherwise they are refused."""
        self.name = f"int{form.bits}_groups"
        self.form, self.quantizes = form, quantizes
        self._columns, self._start = columns, start

    def sizes_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Columns that share a scale, and a unit: those of the checkpoint, cut where parts begin within a group."""
        return self.form.sizes_in(shape[-1], self._start, shape[-1])

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each of the `Pieces` of a weight."""
        form, (group, unit) = self.form, self.sizes_of(shape)
        integer, scale_type = torch.uint8 if form.bits == 4 else torch.int8, getattr(torch, form.scale_dtype)
        num_groups = shape[-1] // group
        if form.ordered:  # a column may have any of the whole row's groups
            num_groups = self._columns // form.sizes_in(self._columns)[0]
        groups = (*shape[:-1], num_groups)
        found = {"codes": ((*shape[:-1], shape[-1] * form.bits // 8), integer), "scale": (groups, scale_type)}
        if form.zero:
            found["zero"] = groups, integer
        if form.minimum:
            found["minimum"] = groups, scale_type
        if form.ordered:
            found["order"] = (*shape[:-2], shape[-1]), torch.int32
        if unit:
            found["scale_unit"] = (*shape[:-1], shape[-1] // unit), torch.float16
            if form.minimum:
                found["minimum_unit"] = found["scale_unit"]
        return found

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return sum(math.prod(one) * dtype.itemsize for one, dtype in self.tensors(shape).values())

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> GroupWeight:
        return GroupWeight(self, shape, dtype, device)
