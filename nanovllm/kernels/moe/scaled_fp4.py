"""MXFP4 weights as the left operand of wgmma: unpacked in registers, and multiplied with their scales.

A weight is unpacked in spans of 4 * DISTANCE columns, which are those of DISTANCE // 2 words of a row (PackedWords of
linear/packed.py). The exponents of a span, one for 32 columns, are loaded together as one integer. As `fp4_factors` and
`scaled_fp4` of linear/packed.py, with fewer instructions: a word holds two factors, and a product takes one of them.

In Gluon, for packed_wide.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.linear.fragments import halves
from nanovllm.kernels.linear.packed import _fp4_bits, both
from nanovllm.kernels.linear.wide_tile import SLAB_ROWS

ROWS = gl.constexpr(SLAB_ROWS)


@gluon.constexpr_function
def spans_layout(distance: int, num_words: int):
    """[64 rows, spans, words of a span], as `_words_layout` of linear/packed_wide.py has [64, words]."""
    width = distance // 2
    bases = [
        [[8, 0], *([0, 1 << i] for i in range(2, num_words.bit_length() - 1))],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
    ]
    bases = [[[row, word // width, word % width] for row, word in one] for one in bases]
    return gl.DistributedLinearLayout(*bases, [], [64, num_words // width, width])


@gluon.jit
def exponents_of(pointers, first, COUNT: gl.constexpr, LAST: gl.constexpr, DISTANCE: gl.constexpr):
    """[64, COUNT] of the spans from `first` on, as words: two or four bytes each. `pointers`: of the rows' first spans.
    Spans after LAST have its exponents; None: there are none."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, spans_layout(DISTANCE, COUNT * DISTANCE // 2))
    span = first + gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    if LAST is not None:
        span = gl.minimum(span, LAST)
    pointers = gl.convert_layout(pointers, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    places = gl.expand_dims(pointers, 1) + gl.expand_dims(span, 0)
    # in assembly because Triton's 16-bit loads are followed by an instruction that clears the upper half
    ASM: gl.constexpr = "ld.global.u16 $0, [$1];" if DISTANCE == 16 else "ld.global.u32 $0, [$1];"
    return gl.inline_asm_elementwise(ASM, "=r,l", [places], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def factors_of(exponents, DISTANCE: gl.constexpr):
    """2^126 * scale * SCALED_FP4 as bfloat16, two in each word: of bytes 0 and 1 of the exponents, and in a second
    tensor of bytes 2 and 3 if they have these."""
    factors = (_two_factors(exponents, "prmt.b32 $0, $1, 0, 0x4140;"),)  # type: tuple
    if DISTANCE == 32:
        factors += (_two_factors(exponents, "prmt.b32 $0, $1, 0, 0x4342;"),)
    return factors


@gluon.jit
def _two_factors(exponents, ASM: gl.constexpr):
    """`ASM` puts one byte into each half of a word."""
    two = gl.inline_asm_elementwise(ASM, "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1)
    return two * 0x80 + both((126 - 32) << 7)


@gluon.jit
def _scaled(words, factors, PAIR: gl.constexpr, HALF: gl.constexpr):
    """Pair PAIR of each word times the factor in half HALF (0 or 1) of `factors`: [..., 2] bfloat16."""
    FACTOR: gl.constexpr = "{a0, a0}" if HALF == 0 else "{a1, a1}"
    ASM: gl.constexpr = (
        "{.reg .b16 a<2>; .reg .b32 f; mov.b32 {a0, a1}, $2; mov.b32 f, " + FACTOR + "; fma.rn.bf16x2 $0, $1, f, $3;}"
    )
    arguments = [_fp4_bits(words, PAIR), factors, both(0x8000)]  # - 0 is added
    product = gl.inline_asm_elementwise(ASM, "=r,r,r,r", arguments, dtype=gl.int32, is_pure=True, pack=1)
    low, high = halves(product, gl.bfloat16, False)
    return gl.join(low, high)


@gluon.jit
def unpacked(words, factors, DISTANCE: gl.constexpr):
    """[64, columns] bfloat16, the numbers times their scales and SCALED_FP4."""
    LAYOUT: gl.constexpr = spans_layout(DISTANCE, words.shape[1])
    codes = gl.reshape(words, [ROWS, words.shape[1] // (DISTANCE // 2), DISTANCE // 2])
    codes = gl.convert_layout(codes, LAYOUT, assert_trivial=True)
    pairs = ()  # type: tuple
    for pair in gl.static_range(4):
        own = gl.convert_layout(factors[pair * DISTANCE // 64], gl.SliceLayout(2, LAYOUT), assert_trivial=True)
        pairs += (_scaled(codes, gl.expand_dims(own, 2), pair, pair * DISTANCE // 32 % 2),)
    joined = gl.join(gl.join(pairs[0], pairs[1]), gl.join(pairs[2], pairs[3]))  # [64, span, word, half, pair, pair]
    return gl.reshape(gl.permute(joined, [0, 1, 5, 4, 2, 3]), [ROWS, words.shape[1] * 8])


@gluon.jit
def half(x, SECOND: gl.constexpr):
    """Half of a tensor along its axis 1, of which a thread has all."""
    first, second = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    return second if SECOND else first


@gluon.jit
def halves_of(tensors, SECOND: gl.constexpr):
    found = ()  # type: tuple
    for i in gl.static_range(len(tensors)):
        found += (half(tensors[i], SECOND),)
    return found
