"""Tensors of 4- or 8-bit integers with a scale per group of columns: w = (q - zero) * scale, or q * scale - minimum.

AWQ, GPTQ, compressed-tensors and GGUF store such numbers in different orders. All are converted to this layout:

  codes    4 bits: uint8 [rows, columns / 2], the even column in the low half of a byte; 0 to 15. 8 bits: int8 [rows,
           columns], 128 less than what a file of unsigned numbers holds.
  scale    [rows, groups], in the type that the file has
  zero     [rows, groups] like the codes. Without zeros and minima 8 stands for 0 in 4 bits, and 0 in 8.
  minimum  [rows, groups] like the scales
  order    [columns] int32, the group of each column, where columns are not in the order of their groups
  scale_unit, minimum_unit
           [rows, columns / unit size] float16: scales and minima are integers, to be multiplied with these
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.tensor import InMemory, check_floats, check_scale, spans, take_blocks, taken
from nanovllm.checkpoint.stored import Part, Stored
from nanovllm.weights.forms import GroupForm

WORD = 32  # bits
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which half byte of a word holds columns 0, 1, ... of the eight that it packs


class Pieces(NamedTuple):
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    minimum: Tensor | None = None
    order: Tensor | None = None
    scale_unit: Tensor | None = None
    minimum_unit: Tensor | None = None


@dataclass(frozen=True)
class GroupTensor:
    """A weight, [out, in]; implements `Stored`."""

    form: GroupForm
    shape: tuple[int, ...]
    codes: Callable[[range, range, torch.device], Tensor]  # of some rows and columns, in the layout above
    scale: Callable[[], Tensor]  # [out, groups]
    zero: Callable[[], Tensor] | None = None  # [out, groups] int32
    group_of: Stored | None = None  # [in]

    def read(self, part: Part = ()) -> Tensor:
        """Dequantized, in float32."""
        rows, columns = spans(part, self.shape)
        sizes = self.form.sizes_in(self.shape[1], columns.start, len(columns))
        return dequantize(self.pieces(part, sizes, torch.device("cpu")), self.form, sizes)

    def pieces(self, part: Part, sizes: tuple[int, int], device: torch.device) -> Pieces:
        """A part, with one scale per `sizes[0]` columns."""
        rows, columns = spans(part, self.shape)
        own = slice(rows.start, rows.stop)
        size, _ = self.form.sizes_in(self.shape[1])
        if self.shape[1] % size:
            raise ValueError(f"groups of {size} columns do not divide its {self.shape[1]} columns")
        scale = check_floats(self.scale(), "scales").to(device)
        expected = [self.shape[0], self.shape[1] // size]
        if list(scale.shape) != expected:
            raise ValueError(f"there are scales for {list(scale.shape)} rows and groups, and {expected} is needed")
        check_scale(scale, may_be_negative=True)  # as AutoRound's are
        zero = None if self.zero is None else self._zeros(self.zero().to(device), expected)
        order = None if self.group_of is None else self.group_of.read()
        if order is not None and order.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"g_idx is {order.dtype}, and torch.int32 is needed")
        whole = Pieces(self.codes(rows, columns, device), scale[own], None if zero is None else zero[own])
        if not self.form.ordered:
            # some files have only zeros where columns are in order
            if (
                order is not None
                and order.any()
                and not torch.equal(order.cpu(), torch.arange(self.shape[1]).int() // size)
            ):
                raise ValueError("g_idx is not in order, although the config says that columns are")
            return cut_groups(whole, self.form, self.shape[1], columns, sizes)
        if order is None or tuple(order.shape) != self.shape[1:]:
            raise ValueError("the config says that columns have any order, and there is no g_idx for each of them")
        if not 0 <= order.min() <= order.max() < expected[1]:
            raise ValueError(f"g_idx names groups outside of 0 to {expected[1] - 1}")
        return whole._replace(order=order[columns.start : columns.stop].to(device, torch.int32))

    def with_rows(self, order: Sequence[int]) -> "GroupTensor":
        """With the row of number `order[i]` at i."""
        stored, index = self.codes, torch.tensor(order)
        scale, zero = self.scale, self.zero

        def codes(rows: range, columns: range, device: torch.device) -> Tensor:
            everything = stored(range(self.shape[0]), columns, device)
            return everything[index[rows.start : rows.stop].to(device)]

        zero_in_order = None if zero is None else lambda: zero()[index]
        return replace(self, codes=codes, scale=lambda: scale()[index], zero=zero_in_order)

    def _zeros(self, zero: Tensor, expected: list[int]) -> Tensor | None:
        """In the type of the codes; None for a symmetric weight, whose zeros are all in the middle."""
        if list(zero.shape) != expected:
            raise ValueError(f"there are zeros for {list(zero.shape)} rows and groups, and {expected} is needed")
        middle = 1 << (self.form.bits - 1)
        if self.form.zero:
            return zero.to(torch.uint8) if self.form.bits == 4 else (zero - middle).to(torch.int8)
        if (zero != middle).any():
            raise ValueError("the config says that the weight is symmetric, and a zero is not in the middle")
        return None


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits], lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., n], each below 16 -> uint8 [..., n / 2]: the even ones in the low halves."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def cut_groups(pieces: Pieces, form: GroupForm, num_columns: int, columns: range, sizes: tuple[int, int]) -> Pieces:
    """Scales, zeros, minima and units of some of a row's columns, per `sizes` columns instead of those of the form."""
    stored = form.sizes_in(num_columns)

    def cut(values: Tensor | None, index: int) -> Tensor | None:
        if values is None:
            return None
        return take_blocks(values, (1, stored[index]), range(values.shape[0]), columns, (1, sizes[index]))

    scale = cut(pieces.scale, 0)
    assert scale is not None
    return pieces._replace(
        scale=scale,
        zero=cut(pieces.zero, 0),
        minimum=cut(pieces.minimum, 0),
        scale_unit=cut(pieces.scale_unit, 1),
        minimum_unit=cut(pieces.minimum_unit, 1),
    )


def dequantize(pieces: Pieces, form: GroupForm, sizes: tuple[int, int]) -> Tensor:
    """In float32: [..., rows, columns]. `sizes`: columns per scale and per unit."""
    codes = (unpack_nibbles(pieces.codes) if form.bits == 4 else pieces.codes).float()
    if pieces.order is None:
        codes = codes.unflatten(-1, (-1, sizes[0]))

    def spread(values: Tensor, unit: Tensor | None = None) -> Tensor:
        """One value for each column, or for each group of columns."""
        values = values.float()
        if unit is not None:
            values = values * unit.float().repeat_interleave(sizes[1] // sizes[0], dim=-1)
        if pieces.order is None:
            return values.unsqueeze(-1)
        index = pieces.order.long().unsqueeze(-2)
        return values.gather(-1, index.expand(*values.shape[:-1], index.shape[-1]))

    if pieces.zero is not None:
        codes -= spread(pieces.zero)
    elif form.bits == 4 and pieces.minimum is None:
        codes -= 8
    codes *= spread(pieces.scale, pieces.scale_unit)
    if pieces.minimum is not None:
        codes -= spread(pieces.minimum, pieces.minimum_unit)
    return codes if pieces.order is not None else codes.flatten(-2)


# --- the layouts of files ---------------------------------------------------------------------------------------------


def gptq(found: dict[str, Stored], form: GroupForm, *, zeros_less_one: bool) -> GroupTensor:
    """qweight [in / 8, out], packed along the columns; qzeros [groups, out / 8]; scales [groups, out].

    `zeros_less_one`: the first version of the format stores zero - 1 in as many bits.
    """
    weight, scales, qzeros = (taken(found, name, 2) for name in ("qweight", "scales", "qzeros"))
    per_word = WORD // form.bits

    def codes(rows: range, columns: range, device: torch.device) -> Tensor:
        words = weight.read((_words(columns, per_word), slice(rows.start, rows.stop)))
        return _as_codes(_integers(words).to(device).t().contiguous().view(torch.uint8), form)

    def zero() -> Tensor:
        stored = unpack(_integers(qzeros.read()), form.bits).t().int()
        return stored + 1 & (1 << form.bits) - 1 if zeros_less_one else stored

    shape = (weight.shape[1], weight.shape[0] * per_word)
    return GroupTensor(form, shape, codes, lambda: scales.read().t(), zero, found.pop("g_idx", None))


def awq(found: dict[str, Stored], form: GroupForm) -> GroupTensor:
    """qweight [in, out / 8] and qzeros [groups, out / 8], packed along the rows in an order of their own; scales
    [groups, out]."""
    weight, scales, qzeros = (taken(found, name, 2) for name in ("qweight", "scales", "qzeros"))

    def in_order(words: Tensor) -> Tensor:
        return unpack(_integers(words), 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)

    def codes(rows: range, columns: range, device: torch.device) -> Tensor:
        words = weight.read((slice(columns.start, columns.stop), _words(rows, 8)))
        return pack_nibbles(in_order(words.to(device))[:, : len(rows)].t())

    shape = (weight.shape[1] * 8, weight.shape[0])
    return GroupTensor(form, shape, codes, lambda: scales.read().t(), lambda: in_order(qzeros.read()).t().int())


def compressed(found: dict[str, Stored], form: GroupForm) -> GroupTensor:
    """weight_packed [out, in / 8], packed along the columns; weight_scale [out, groups]; weight_zero_point
    [out / 8, groups], packed along the rows."""
    weight, scales = taken(found, "weight_packed", 2), taken(found, "weight_scale", 2)
    found.pop("weight_shape", None)
    zeros = taken(found, "weight_zero_point", 2) if form.zero else None
    per_word = WORD // form.bits
    if zeros is not None and zeros.shape[0] != -(-weight.shape[0] // per_word):
        raise ValueError(f"weight_zero_point has {zeros.shape[0]} rows of words for {weight.shape[0]} rows")

    def codes(rows: range, columns: range, device: torch.device) -> Tensor:
        words = weight.read((slice(rows.start, rows.stop), _words(columns, per_word)))
        return _as_codes(_integers(words).to(device).contiguous().view(torch.uint8), form)

    def zero(zeros: Stored) -> Tensor:
        return unpack(_integers(zeros.read()).t(), form.bits).t()[: weight.shape[0]].int()

    shape = (weight.shape[0], weight.shape[1] * per_word)
    read_zero = None if zeros is None else lambda: zero(zeros)
    return GroupTensor(form, shape, codes, scales.read, read_zero, found.pop("weight_g_idx", None))


def _integers(words: Tensor) -> Tensor:
    if words.dtype != torch.int32:
        raise ValueError(f"packed numbers are {words.dtype}, and int32 is needed")
    return words


def _words(wanted: range, per_word: int) -> slice:
    """The words that hold some columns, or rows."""
    if wanted.start % per_word:
        raise ValueError(f"ranks divide it at {wanted.start}, within a word of {per_word} numbers; use fewer ranks")
    return slice(wanted.start // per_word, -(-wanted.stop // per_word))


def _as_codes(octets: Tensor, form: GroupForm) -> Tensor:
    """Bytes as files pack them along the columns: 4-bit codes are as in memory, 8-bit ones become signed."""
    return octets if form.bits == 4 else (octets ^ 0x80).view(torch.int8)


# --- made while loading -----------------------------------------------------------------------------------------------


def quantize_groups(weight: Tensor, form: GroupForm) -> GroupTensor:
    """Round [out, in] to integers; a group's largest number becomes the largest integer, symmetric or not as the form
    says. A group of zeros gets scale 1."""
    bits, (size, _) = form.bits, form.sizes_in(weight.shape[1])
    if weight.shape[1] % size:
        raise ValueError(f"groups of {size} columns do not divide its {weight.shape[1]} columns")
    grouped = weight.float().unflatten(1, (-1, size))
    middle, steps = 1 << (bits - 1), (1 << bits) - 1
    if form.zero:
        low, high = grouped.amin(dim=-1).clamp(max=0), grouped.amax(dim=-1).clamp(min=0)
        scale = (high - low) / steps
    else:
        scale = grouped.abs().amax(dim=-1) / (middle - 1)
    if not torch.isfinite(scale).all():
        raise ValueError(f"it holds NaN or infinity, which {bits}-bit weights cannot represent")
    scale = torch.where(scale == 0, 1.0, scale).to(getattr(torch, form.scale_dtype))
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).tiny, scale)  # too small for its type
    exact = scale.float().unsqueeze(-1)
    zero = (-low / scale.float()).round().clamp(0, steps).int() if form.zero else torch.full_like(scale, middle).int()
    codes = ((grouped / exact).round() + zero.unsqueeze(-1)).clamp(0, steps).flatten(1).to(torch.uint8)
    octets = pack_nibbles(codes) if bits == 4 else codes

    def part(rows: range, columns: range, device: torch.device) -> Tensor:
        per_byte = 8 // bits
        own = octets[rows.start : rows.stop, columns.start // per_byte : columns.stop // per_byte]
        return _as_codes(own.to(device).contiguous(), form)

    in_order = InMemory(torch.arange(weight.shape[1], dtype=torch.int32) // size)
    return GroupTensor(form, tuple(weight.shape), part, lambda: scale, lambda: zero, in_order)
