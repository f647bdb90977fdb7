"""Tensors of 4-bit floating point numbers (e2m1) with a scale per group of columns, in bytes of two numbers each.

MXFP4: groups of 32, scales that are powers of two (e8m0). NVFP4: groups of 16, scales in e4m3, and one float32 number
for the whole tensor that scales are multiplied with (ModelOpt) or divided by (compressed-tensors).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.groups import pack_nibbles, unpack_nibbles
from nanovllm.checkpoint.packed.tensor import InMemory, check_floats, check_scale, spans, take_blocks, taken
from nanovllm.checkpoint.reordered import Reordered
from nanovllm.checkpoint.stored import Part, Stored
from nanovllm.weights.forms import Fp4Form

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the low three bits; the fourth is the sign
E8M0_ONE, E8M0_NAN = 127, 255


class Fp4Pieces(NamedTuple):
    codes: Tensor  # uint8 [rows, columns / 2]: the even column in the low half
    scale: Tensor  # [rows, groups]: uint8 (e8m0) or float8_e4m3fn
    unit: Tensor | None  # [rows] float32


@dataclass(frozen=True)
class Fp4Tensor:
    """A weight, [out, in]; implements `Stored`."""

    form: Fp4Form
    codes: Stored  # uint8 [out, in / 2]
    scale: Stored  # [out, groups]
    unit: Stored | None = None  # one number
    divides: bool = False  # the scales are divided by it

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def read(self, part: Part = ()) -> Tensor:
        """Dequantized, in float32."""
        _, columns = spans(part, self.shape)
        group = self.form.group_in(columns.start, len(columns))
        return dequantize(self.pieces(part, group, torch.device("cpu")), group)

    def pieces(self, part: Part, group: int, device: torch.device) -> Fp4Pieces:
        """A part, with one scale per `group` columns."""
        rows, columns = spans(part, self.shape)
        own, halves = slice(rows.start, rows.stop), slice(columns.start // 2, columns.stop // 2)
        size = self.form.group_size
        expected = self.shape[0], -(-self.shape[1] // size)
        if self.scale.shape != expected:
            raise ValueError(f"its scales have shape {list(self.scale.shape)}, and {list(expected)} is needed")
        codes, scale = self.codes.read((own, halves)).to(device), self.scale.read((own,)).to(device)
        kind = torch.float8_e4m3fn if self.form.has_unit else torch.uint8
        if scale.dtype != kind or codes.dtype != torch.uint8:
            found = f"{codes.dtype} numbers with {scale.dtype} scales"
            raise ValueError(f"{found}, and torch.uint8 with {kind} is needed")
        if (scale.view(torch.uint8) & 0x7F == 0x7F if self.form.has_unit else scale == E8M0_NAN).any():
            raise ValueError("a scale is NaN")
        if codes.numel() and not scale.view(torch.uint8).any() and (codes & 0x77).any():  # 0x77: without the signs
            raise ValueError("all scales are zero")  # one may be: too small for its type
        scale = take_blocks(scale.view(torch.uint8), (1, size), range(len(rows)), columns, (1, group)).view(kind)
        if not self.form.has_unit:
            return Fp4Pieces(codes, scale, None)
        if self.unit is None:
            raise ValueError("the scale of the whole tensor is missing")
        unit = check_floats(self.unit.read(), "scales of whole tensors").to(device, torch.float32).flatten()
        if unit.numel() != 1:
            raise ValueError(f"the scale of the whole tensor has {unit.numel()} numbers, and one is needed")
        check_scale(unit)
        return Fp4Pieces(codes, scale, (1 / unit if self.divides else unit).expand(len(rows)))

    def with_rows(self, order: Sequence[int]) -> "Fp4Tensor":
        """With the row of number `order[i]` at i."""
        return replace(self, codes=Reordered(self.codes, order), scale=Reordered(self.scale, order))


def dequantize(pieces: Fp4Pieces, group: int) -> Tensor:
    """In float32: [..., rows, columns]."""
    codes = unpack_nibbles(pieces.codes)
    size = (codes & 7).float()
    size = torch.maximum(size / 2, torch.maximum(size - 2, 2 * size - 8))  # NUMBERS, without a table to copy
    numbers = torch.where(codes > 7, -size, size).unflatten(-1, (-1, group))
    scale = pieces.scale
    scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
    if pieces.unit is not None:
        scale = scale * pieces.unit.unsqueeze(-1)
    return (numbers * scale.unsqueeze(-1)).flatten(-2)


def quantize_fp4(weight: Tensor, form: Fp4Form) -> Fp4Tensor:
    """Round [out, in] to fp4, for random weights."""
    grouped = weight.float().unflatten(1, (-1, form.group_size))
    largest = grouped.abs().amax(dim=-1)
    unit = None
    if form.has_unit:
        unit = (largest.amax() / (448 * NUMBERS[-1])).clamp(min=torch.finfo(torch.float32).tiny)
        stored = (largest / NUMBERS[-1] / unit).clamp(min=2**-9).to(torch.float8_e4m3fn)
        scale = stored.float() * unit
    else:
        exponent = (largest.log2().ceil() - 2).clamp(-127, 127)
        stored, scale = (exponent + E8M0_ONE).to(torch.uint8), exponent.exp2()
    scaled = grouped / scale.unsqueeze(-1)
    edges = torch.tensor([(low + high) / 2 for low, high in zip(NUMBERS, NUMBERS[1:], strict=False)])
    codes = torch.bucketize(scaled.abs(), edges.to(weight.device)) + 8 * (scaled < 0)
    packed = pack_nibbles(codes.flatten(1).to(torch.uint8))
    return Fp4Tensor(form, InMemory(packed), InMemory(stored), None if unit is None else InMemory(unit))


# --- experts in the layout of gpt-oss ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ExpertRows:
    """Every `step`-th row of one expert in a tensor of all, [experts, rows, ...], as a matrix; implements `Stored`."""

    stack: Stored
    expert: int
    first: int
    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        _, rows, groups, *size = self.stack.shape
        return rows // self.step, groups * (size[0] if size else 1)

    def read(self, part: Part = ()) -> Tensor:
        rows, columns = spans(part, self.shape)
        span = slice(rows.start * self.step, rows.stop * self.step)
        found = self.stack.read((slice(self.expert, self.expert + 1), span))[0, self.first :: self.step]
        return found.flatten(1)[:, columns.start : columns.stop]


def unstack_experts(found: dict[str, Stored], form: Fp4Form) -> Iterator[tuple[str, Stored]]:
    """(name, weight) of each expert from `found`, which loses them: {gate_up,down}_proj_blocks [experts, rows, groups,
    16] and _scales [experts, rows, groups]. Rows of gate and up alternate."""
    for stacked, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        if f"{stacked}_blocks" not in found:
            continue
        blocks, scales = taken(found, f"{stacked}_blocks", 4), taken(found, f"{stacked}_scales", 3)
        if blocks.shape[1] % len(names):
            raise ValueError(f"{stacked}_blocks has {blocks.shape[1]} rows, which do not divide into gate and up")
        if scales.shape != blocks.shape[:-1]:
            raise ValueError(
                f"{stacked}_scales has shape {list(scales.shape)}, and {list(blocks.shape[:-1])} is needed"
            )
        for expert in range(blocks.shape[0]):
            for first, name in enumerate(names):
                codes, scale = (_ExpertRows(stack, expert, first, len(names)) for stack in (blocks, scales))
                yield f"{expert}.{name}.weight", Fp4Tensor(form, codes, scale)
