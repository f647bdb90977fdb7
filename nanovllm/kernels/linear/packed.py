"""Packed weights in kernels: how numbers are taken from words, and the scales of their groups.

Words are in the order of checkpoint/packed/words.py. A number becomes a 16-bit float by placing its bits in one, two at
a time: an integer in the mantissa of 128 (bfloat16) or 1024 (float16), which is then subtracted; a small float in
exponent and mantissa, which is then multiplied with the power of two by which the exponents' biases differ. Both are
exact. Scales are float32 and are applied to sums of products, except in packed_wide.py's larger tiles.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.linear.fragments import halves


class PackedWords(NamedTuple):
    """A weight, [N, K], or those of experts, [E, N, K]."""

    kind: str  # int4, int8, fp8 (e4m3) or fp4 (e2m1)
    distance: int  # columns between the pairs of a word
    words: Tensor  # [..., N, K * bits / 32] int32
    scale: Tensor  # [..., N / scale_rows, groups]; uint8: exponents (e8m0)
    scale_rows: int = 1  # rows that share a scale
    zero: Tensor | None = None  # [..., N, groups]: w = (q - zero) * scale; None = 8 for int4 without a minimum, else 0
    minimum: Tensor | None = None  # [..., N, groups]: w = q * scale - minimum
    scale_unit: Tensor | None = None  # [..., N, units]: scales are multiplied with these
    minimum_unit: Tensor | None = None  # [..., N, units]
    rounds_inputs: bool = False  # the product is defined with inputs rounded to fp8

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.words.shape[:-1], self.words.shape[-1] * 2 * self.num_pairs

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "fp4") else 8

    @property
    def num_pairs(self) -> int:
        return 16 // self.bits

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        return self.words, self.scale, self.zero, self.minimum, self.scale_unit, self.minimum_unit

    @property
    def constants(self) -> dict[str, Any]:
        """The kernels' constexpr parameters that describe the weight."""
        return {
            "KIND": self.kind,
            "PAIRS": self.num_pairs,
            "DISTANCE": self.distance,
            "GROUPS": self.scale.shape[-1],
            "UNITS": 1 if self.scale_unit is None else self.scale_unit.shape[-1],
            "SCALE_ROWS": self.scale_rows,
        }


def interpreted(kernel: Any) -> bool:
    return not isinstance(kernel, triton.JITFunction)


# --- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def fma2(a, b, c, ITEM: tl.constexpr):
    """a * b + c of the two 16-bit floats in each 32-bit word."""
    ASM: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;" if ITEM.is_bf16() else "fma.rn.f16x2 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _inserted(words, MASK: tl.constexpr, BASE: tl.constexpr):
    """(words & both(MASK)) | both(BASE), in one instruction."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;",
        "=r,r,r,r",
        [words, both(MASK), both(BASE)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def both(value: tl.constexpr):
    """A word with these 16 bits in both halves."""
    half = tl.cast(value, tl.int32)
    return half | (half << 16)


@triton.jit
def times2(a, b, ITEM: tl.constexpr):
    return fma2(a, b, both(0x8000), ITEM)  # - 0


@triton.jit
def _placed(words, FROM: tl.constexpr, TO: tl.constexpr):
    if TO >= FROM:
        return words << (TO - FROM)
    else:
        return words >> (FROM - TO)


@triton.jit
def _fp8(words, PAIR: tl.constexpr, ITEM: tl.constexpr):
    """e4m3: sign, exponent and mantissa at their places in a 16-bit float, then corrected for the bias."""
    TO: tl.constexpr = 4 if ITEM.is_bf16() else 7
    BIAS: tl.constexpr = 0x7B80 if ITEM.is_bf16() else 0x5C00  # 2^120, 2^8
    magnitude = _placed(words, 8 * PAIR, TO) & both(0x7F << TO)
    sign = _placed(words, 8 * PAIR + 7, 15) & both(0x8000)
    return times2(magnitude | sign, both(BIAS), ITEM)


@triton.jit
def _fp4_bits(words, PAIR: tl.constexpr):
    """e2m1, from the order FLOAT_BITS of checkpoint/packed/words.py: sign, exponent and mantissa at their places in a
    bfloat16, which is 2^-126 times the number."""
    if PAIR == 3:
        return ((words << 6) & both(0x80C0)) | ((words >> 2) & both(0x0100))
    elif PAIR == 2:
        rotated = (words << 26) | (words.to(tl.uint32, bitcast=True) >> 6).to(tl.int32, bitcast=True)
        return rotated & both(0x81C0)
    else:
        return (words << (4 * PAIR)) & both(0x81C0)


@triton.jit
def _fp4(words, PAIR: tl.constexpr, ITEM: tl.constexpr):
    bits = _fp4_bits(words, PAIR)
    if ITEM.is_bf16():
        return times2(bits, both(0x7E80), ITEM)  # 2^126
    else:
        return times2((bits & both(0x8000)) | ((bits & both(0x01C0)) << 3), both(0x7400), ITEM)  # 2^14


# --- 4-bit floats with their scale ---

# Products and sums of them have this factor, so that a bfloat16 holds numbers with scales from 2^-93 to 2^33.
SCALED_FP4 = tl.constexpr(2.0**-32)


@triton.jit
def fp4_factors(exponents, PART: tl.constexpr):
    """Byte PART of words of exponents (e8m0), as what `scaled_fp4` multiplies with: 2^126 * scale * SCALED_FP4, twice
    in a word, as bfloat16."""
    return ((exponents >> (8 * PART)) & 0xFF) * both(0x80) + both((126 - 32) << 7)


@triton.jit
def scaled_fp4(words, factors, PAIR: tl.constexpr, INTERPRETED: tl.constexpr):
    """Pair PAIR of each word times its scale and SCALED_FP4, exactly: [..., 2] bfloat16 (float32 in the interpreter).
    `factors`: of the words' shape or one that broadcasts to it."""
    bits = _fp4_bits(words, PAIR)
    if INTERPRETED:
        factor = (factors << 16).to(tl.float32, bitcast=True)
        low = (bits << 16).to(tl.float32, bitcast=True) * factor
        high = (bits & -65536).to(tl.float32, bitcast=True) * factor
    else:
        low, high = halves(times2(bits, tl.broadcast_to(factors, bits.shape), tl.bfloat16), tl.bfloat16, False)
    return tl.join(low, high)


@triton.jit
def _integers(words, zero, PAIR: tl.constexpr, BITS: tl.constexpr, ITEM: tl.constexpr):
    BFLOAT16: tl.constexpr = ITEM.is_bf16()
    ONE: tl.constexpr = 0x3F80 if BFLOAT16 else 0x3C00
    BASE: tl.constexpr = 0x4300 if BFLOAT16 else 0x6400  # 128, 1024: a unit is the last bit of the mantissa
    if BITS == 4:
        minus = zero | (BASE | 0x8000)  # - (BASE's number + zero)
        y = _inserted(words >> (4 * PAIR), 0xF, BASE)
    elif BFLOAT16:  # seven bits of the mantissa, and the sign bit, which counts -128: BASE | 0x80 is 256
        shifted = words >> (8 * PAIR)
        y = fma2(_inserted(shifted, 0x7F, BASE), both(ONE), _inserted(shifted, 0x80, BASE | 0x8000), ITEM)
        minus = None if zero is None else _bits(-zero, ITEM)
    else:
        y = (((words >> (8 * PAIR)) & both(0xFF)) ^ both(0x80)) | both(BASE)
        minus = tl.cast(0xE480, tl.int32) if zero is None else _bits(-1152 - zero, ITEM)
    if minus is not None:
        y = fma2(y, both(ONE), minus | (minus << 16), ITEM)
    return y


@triton.jit
def _bits(values, ITEM: tl.constexpr):
    return values.to(ITEM).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _number(words, zero, FIRST: tl.constexpr, KIND: tl.constexpr):
    """The number at bit FIRST in float32, for the interpreter."""
    if KIND == "int4":
        return (((words >> FIRST) & 15) - zero).to(tl.float32)
    elif KIND == "int8":
        code = (((words >> FIRST) & 255) ^ 128) - 128
        return (code if zero is None else code - zero).to(tl.float32)
    elif KIND == "fp8":
        code = words >> FIRST
        return (((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        bits = _fp4_bits(words, FIRST % 16 // 4)
        bits = bits << 16 if FIRST < 16 else bits & -65536
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def numbers(words, zero, PAIR: tl.constexpr, KIND: tl.constexpr, ITEM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Pair PAIR of each word without its scale, [..., 2] of type ITEM (float32 in the interpreter). `zero`: integers of
    `words`' shape or one that broadcasts to it; None for floats, and for int8 without zeros."""
    BITS: tl.constexpr = 4 if KIND == "int4" or KIND == "fp4" else 8
    if INTERPRETED:
        low, high = _number(words, zero, BITS * PAIR, KIND), _number(words, zero, 16 + BITS * PAIR, KIND)
    else:
        low, high = halves(_pair(words, zero, PAIR, KIND, ITEM), ITEM, False)
    return tl.join(low, high)


@triton.jit
def scaled_numbers(words, zero, scale, PAIR: tl.constexpr, KIND: tl.constexpr, ITEM: tl.constexpr):
    """As `numbers`, multiplied with float32 scales. Scale and product are rounded to ITEM."""
    factor = _bits(scale, ITEM)
    low, high = halves(times2(_pair(words, zero, PAIR, KIND, ITEM), factor | (factor << 16), ITEM), ITEM, False)
    return tl.join(low, high)


@triton.jit
def _pair(words, zero, PAIR: tl.constexpr, KIND: tl.constexpr, ITEM: tl.constexpr):
    """Pair PAIR of each word as two floats of type ITEM in a word."""
    if KIND == "int4" or KIND == "int8":
        return _integers(words, zero, PAIR, 4 if KIND == "int4" else 8, ITEM)
    elif KIND == "fp8":
        return _fp8(words, PAIR, ITEM)
    else:
        return _fp4(words, PAIR, ITEM)


@triton.jit
def items_of(words, ITEM: tl.constexpr):
    """The two 16-bit items of each word, [..., 2]. In plain operations, which the compiler undoes where it packs items
    into registers again."""
    return tl.join(words.to(tl.int16).to(ITEM, bitcast=True), (words >> 16).to(tl.int16).to(ITEM, bitcast=True))


@triton.jit
def raw_numbers(words, PAIR: tl.constexpr, KIND: tl.constexpr, ITEM: tl.constexpr):
    """Pair PAIR of each word of integers, [..., 2] of type ITEM; those of 4 bits are
    128 (bfloat16) or 1024 (float16) too large."""
    if KIND == "int4":
        shifted = words if PAIR == 0 else words >> (4 * PAIR)
        return items_of(_inserted(shifted, 0xF, 0x4300 if ITEM.is_bf16() else 0x6400), ITEM)
    else:
        return items_of(_integers(words, None, PAIR, 8, ITEM), ITEM)


# --- scales -----------------------------------------------------------------------------------------------------------


@triton.jit
def loaded(pointers, inside):
    """Zeros where not `inside`, which may be None."""
    return tl.load(pointers) if inside is None else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def scales(scale, unit, row, group, inside, GROUPS: tl.constexpr, UNITS: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """In float32, of rows and groups that broadcast; 0 where not `inside`, which may be None. Minima are read alike."""
    E8M0: tl.constexpr = scale.dtype.element_ty.is_uint8()
    s = loaded(scale + row // SCALE_ROWS * GROUPS + group, inside)
    s = (s.to(tl.int32) << 23).to(tl.float32, bitcast=True) if E8M0 else s.to(tl.float32)
    if unit is not None:
        s *= loaded(unit + row * UNITS + group // (GROUPS // UNITS), inside).to(tl.float32)
    return s


@triton.jit
def zeros_of(zero, minimum, row, group, inside, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """As `numbers` takes them, of int4 and of int8 with zeros.

    A byte is taken from a word: Triton (3.6) gives a tensor that depends on loads of bytes another layout as an operand
    of the tensor cores than one of words has, and would move both between threads.
    """
    if zero is not None:
        index = row * GROUPS + group
        pointers = zero.to(tl.pointer_type(tl.int32)) + (index >> 2)
        found = (loaded(pointers, inside) >> ((index & 3) << 3)) & 255
        return (found ^ 128) - 128 if KIND == "int8" else found
    else:
        return tl.cast(8 if minimum is None else 0, tl.int32)


@triton.jit
def parts_of(pointer, row, span, first: tl.constexpr, SPANS: tl.constexpr, GROUPS: tl.constexpr):
    """The scales or zeros of a span's groups for rows and spans `first` + `span`, as a tuple: one word that holds those
    of all groups, if they have 16 or 32 bits together, otherwise one tensor for each group."""
    PARTS: tl.constexpr = max(1, GROUPS // SPANS)
    BITS: tl.constexpr = PARTS * pointer.dtype.element_ty.primitive_bitwidth
    found = ()  # type: tuple
    if PARTS > 1 and BITS == 32:
        found += (tl.load(pointer.to(tl.pointer_type(tl.int32)) + (row * SPANS + span) + first),)
    elif PARTS > 1 and BITS == 16:
        found += (tl.load(pointer.to(tl.pointer_type(tl.int16)) + (row * SPANS + span) + first),)
    elif PARTS > 1:
        for part in tl.static_range(PARTS):
            found += (tl.load(pointer + (row * GROUPS + span * PARTS) + (first * PARTS + part)),)
    else:
        found += (tl.load(pointer + row * GROUPS + (span + first) * GROUPS // SPANS),)
    return found


@triton.jit
def of_part(found, part: tl.constexpr, TYPE: tl.constexpr):
    """The item of group `part` of what `parts_of` gives."""
    BITS: tl.constexpr = TYPE.primitive_bitwidth
    if found[0].dtype == TYPE:
        return found[part]
    elif BITS == 16:
        return (found[0] >> (16 * part)).to(tl.int16).to(TYPE, bitcast=True)
    else:
        return (found[0] >> (8 * part)).to(tl.int8).to(TYPE, bitcast=True)


@triton.jit
def offset_of_part(found, part: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr, ITEM: tl.constexpr):
    """What is too much in `raw_numbers`, in float32: zero, and 128 or 1024 for 4 bits."""
    if KIND == "int4":
        AT: tl.constexpr = 16 if ITEM.is_bf16() else 13  # the place of the last bit before the point
        bits = of_part(found, part, TYPE).to(tl.uint8, bitcast=True).to(tl.int32) << AT
        return (bits | (0x43000000 if ITEM.is_bf16() else 0x44800000)).to(tl.float32, bitcast=True)
    else:
        return of_part(found, part, TYPE).to(tl.float32)


# --- the reference ----------------------------------------------------------------------------------------------------


FP4_PLACES = ((6, 7, 8, 15), (2, 3, 4, 11), (12, 13, 14, 21), (0, 1, 10, 9))  # of the bits of each pair's first number


def dequantize_reference(packed: PackedWords) -> Tensor:
    """[..., N, K] in float32, number by number."""
    bits, words = packed.bits, packed.words.long()
    pairs = []
    for pair in range(packed.num_pairs):
        places = FP4_PLACES[pair] if packed.kind == "fp4" else range(bits * pair, bits * (pair + 1))
        halves = [sum(((words >> (place + high) % 32) & 1) << i for i, place in enumerate(places)) for high in (0, 16)]
        pairs.append(torch.stack([torch.as_tensor(half) for half in halves], dim=-1))
    codes = torch.stack(pairs, dim=-2).unflatten(-3, (-1, packed.distance // 2))  # [..., span, word, pair, of the pair]
    codes = codes.movedim(-2, -3).flatten(-4)
    if packed.kind == "fp8":
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif packed.kind == "fp4":
        table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
        values = torch.cat([table, -table])[codes]
    else:
        values = (codes if packed.kind == "int4" else (codes ^ 128) - 128).float()
    values = values.unflatten(-1, (packed.scale.shape[-1], -1))
    rows = packed.words.shape[-2]

    def spread(values: Tensor, unit: Tensor | None, num_rows: int = 1) -> Tensor:
        if values.dtype == torch.uint8:
            values = values.view(torch.float8_e8m0fnu)
        values = values.float().repeat_interleave(num_rows, -2)[..., :rows, :]
        if unit is not None:
            values = values * unit.float().repeat_interleave(values.shape[-1] // unit.shape[-1], -1)
        return values.unsqueeze(-1)

    scale = spread(packed.scale, packed.scale_unit, packed.scale_rows)
    if packed.zero is not None:
        values = values - packed.zero.unsqueeze(-1).float()
    elif packed.kind == "int4" and packed.minimum is None:
        values = values - 8
    values = values * scale
    if packed.minimum is not None:
        values = values - spread(packed.minimum, packed.minimum_unit)
    return values.flatten(-2)
