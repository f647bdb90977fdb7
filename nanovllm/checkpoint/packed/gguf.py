"""Blocks of GGUF as integers with a scale per group of columns, exactly: the layout of checkpoint/packed/groups.py.

ggml-common.h defines the blocks: of 32 weights with float16 scales, or (K) of 256 weights in groups of 16 or 32, whose
scales and minima are integers in units of one float16 number per block. Numbers of 5 and 6 bits are kept in 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.fp4 import Fp4Pieces, Fp4Tensor
from nanovllm.checkpoint.packed.gguf_types import FORMS, in_blocks
from nanovllm.checkpoint.packed.groups import Pieces, cut_groups, pack_nibbles
from nanovllm.checkpoint.packed.tensor import InMemory, spans
from nanovllm.checkpoint.stored import Part
from nanovllm.weights.forms import Form, Fp4Form, GroupForm


@dataclass(frozen=True)
class ReorderedColumns:
    """A tensor of a GGUF file whose columns are read in another order, `size` neighbours at a time; it stays packed.

    Implements `Stored`.
    """

    tensor: Any
    order: Sequence[int]  # where the tensor has block i of `size` columns
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def form(self) -> Form | None:
        return in_blocks(self.tensor.form, self.size)

    @property
    def type_name(self) -> str:
        return self.tensor.type_name

    def blocks(self, part: Part) -> tuple[Tensor, range]:
        """The blocks of the rows in `part`: all columns, in the order of the file."""
        return self.tensor.blocks(part)

    def read(self, part: Part = ()) -> Tensor:
        rows, columns = (*part, slice(None), slice(None))[:2]
        return self._in_order(self.tensor.read((rows,)))[:, columns]

    def pieces(self, part: Part, sizes: tuple[int, int], device: torch.device) -> Pieces:
        form, (rows, columns) = self.form, spans(part, self.shape)
        assert isinstance(form, GroupForm)
        stored: Pieces = self.tensor.pieces((slice(rows.start, rows.stop),), form.sizes_in(self.shape[1]), device)
        whole = stored._replace(
            **{name: self._in_order(one) for name, one in stored._asdict().items() if one is not None}
        )
        first, last = (edge * form.bits // 8 for edge in (columns.start, columns.stop))
        return cut_groups(whole._replace(codes=whole.codes[:, first:last]), form, self.shape[1], columns, sizes)

    def _in_order(self, values: Tensor) -> Tensor:
        """[rows, n], of which each block has an equal share."""
        return values.unflatten(1, (len(self.order), -1))[:, torch.tensor(self.order)].flatten(1)


def unpack_blocks(raw: Tensor, kind: str) -> Pieces:
    """uint8 [rows, blocks, bytes per block] of a type -> the pieces of these rows, all columns."""
    blocks = UNPACK[kind](raw)
    rows = {name: one.flatten(1) for name, one in zip(Pieces._fields, blocks, strict=True) if one is not None}
    if not all(torch.isfinite(one).all() for one in rows.values() if one.is_floating_point()):
        raise ValueError("a scale is infinite or NaN")
    if FORMS[kind].bits == 4:
        rows["codes"] = pack_nibbles(rows["codes"])
    return Pieces(**rows)


def mxfp4_pieces(raw: Tensor, columns: range, group: int) -> Fp4Pieces:
    """Blocks of MXFP4, [rows, blocks, 17]: an exponent (e8m0), the first 16 numbers in the low halves of bytes, then
    the others in the high halves. `columns`: those that are wanted, with one scale per `group` of them."""
    codes = pack_nibbles(_low_then_high(raw[..., 1:]).flatten(1))
    tensor = Fp4Tensor(Fp4Form(32), InMemory(codes), InMemory(raw[..., 0]))
    return tensor.pieces((slice(None), slice(columns.start, columns.stop)), group, raw.device)


def _halves(raw: Tensor, first: int) -> Tensor:
    """The float16 number at byte `first` of every block: [rows, blocks, 1]."""
    return raw[..., first : first + 2].contiguous().view(torch.float16)


def _low_then_high(octets: Tensor) -> Tensor:
    """The low half of every byte, then the high half of every byte."""
    return torch.cat([octets & 15, octets >> 4], dim=-1)


def _bits(octets: Tensor) -> Tensor:
    """The bits of all bytes, lowest first: [..., n] -> [..., 8 * n]."""
    return (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=octets.device) & 1).flatten(-2)


def _q4_0(raw: Tensor) -> Pieces:
    return Pieces(_low_then_high(raw[..., 2:]), _halves(raw, 0))


def _q4_1(raw: Tensor) -> Pieces:
    return Pieces(_low_then_high(raw[..., 4:]), _halves(raw, 0), minimum=-_halves(raw, 2))


def _q5_0(raw: Tensor) -> Pieces:
    codes = _low_then_high(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4
    return Pieces(codes.to(torch.int8) - 16, _halves(raw, 0))


def _q5_1(raw: Tensor) -> Pieces:
    codes = _low_then_high(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4
    return Pieces(codes.to(torch.int8), _halves(raw, 0), minimum=-_halves(raw, 2))


def _q8_0(raw: Tensor) -> Pieces:
    return Pieces(raw[..., 2:].contiguous().view(torch.int8), _halves(raw, 0))


def scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minima of 6 bits in bytes 4 to 15: of the first four of each the low 6 bits of the
    first and the second four bytes; of the last four the halves of the third four bytes, and the high 2 bits."""
    first, second, third = raw[..., 4:16].split(4, dim=-1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    return scales, torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)


def _in_units(raw: Tensor, codes: Tensor) -> Pieces:
    scales, minima = scales_and_minima(raw)
    return Pieces(codes, scales, minimum=minima, scale_unit=_halves(raw, 0), minimum_unit=_halves(raw, 2))


def _q4_k(raw: Tensor) -> Pieces:
    codes = _low_then_high(raw[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return _in_units(raw, codes)


def _q5_k(raw: Tensor) -> Pieces:
    low = _low_then_high(raw[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)  # [..., 8, 32]
    high = _bits(raw[..., 16:48]).unflatten(-1, (32, 8)).transpose(-1, -2)  # bit j of byte i: weight i of group j
    return _in_units(raw, (low | high << 4).flatten(-2).to(torch.int8))


def _q6_k(raw: Tensor) -> Pieces:
    low = raw[..., :128].unflatten(-1, (2, 2, 32))  # of each half of the block: two times 32 bytes
    low = torch.cat([low & 15, low >> 4], dim=-2)  # [..., 2, 4, 32]
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    codes = low | (high >> shifts & 3) << 4
    scales = raw[..., 192:208].contiguous().view(torch.int8)
    return Pieces(codes.flatten(-3).to(torch.int8) - 32, scales, scale_unit=_halves(raw, 208))


UNPACK = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
