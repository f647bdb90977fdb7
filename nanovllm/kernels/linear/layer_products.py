"""Products of packed_layer.py: of units of a weight in shared memory with inputs in registers.

A unit is 16 rows of a piece of 2,048 columns; each of eight warps has a span of 256 of them. Words become the left
operand of the tensor cores in registers (see fragments.py), inputs are the right one, whose columns are their rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from nanovllm.kernels.linear.many_rows import _barrier
from nanovllm.kernels.linear.packed import items_of, times2

MAX_ROWS = 8
ROWS = gl.constexpr(MAX_ROWS)
WARPS = gl.constexpr(8)  # that divide K: each has a span of 256 columns of a piece
UP = gl.constexpr(96)  # inputs are multiplied with 2^96, those of every second pair with 2^92,
DOWN = gl.constexpr(2.0 ** (133 - 96))  # and sums with this
EVEN = gl.constexpr((127 + 96) << 7)  # 2^96 and 2^92 as bfloat16
ODD = gl.constexpr((127 + 92) << 7)


@gluon.constexpr_function
def _tile_layout(rows: int):
    """[warps, rows, 32 words]: thread 4 r + l has words 8 l to 8 l + 7 of rows r and r + 8. As halves of eight words,
    those of two rows are in other banks."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *([[0, 8, 0]] if rows == 16 else [])]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [8, rows, 32])


MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS.value, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 4))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 4))
OF_ROWS = gl.constexpr(gl.SliceLayout(2, MMA.value))
W_TILE = gl.constexpr(_tile_layout(16))
X_TILE = gl.constexpr(_tile_layout(8))
# [16 rows, warps], which permuted is OF_ROWS
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[0, 1], [0, 2], [0, 4]], [], [16, WARPS.value]
    )
)


@gluon.jit
def _in_mma_order(tile, ITEM: gl.constexpr):
    """[warps, rows, 32 words] as [warps, rows, 64 items]: words 0 and 1 of a thread belong to one instruction, 2 and 3
    to the next, so that registers need not be moved."""
    EIGHTS: gl.constexpr = tile.shape[1] // 8
    tile = gl.permute(gl.reshape(tile, [WARPS, EIGHTS, 8, 4, 2, 4]), [3, 2, 0, 1, 4, 5])
    items = gl.reshape(items_of(tile, ITEM), [4, 8, WARPS, EIGHTS, 2, 2, 2, 2])
    return gl.reshape(gl.permute(items, [2, 3, 1, 4, 6, 0, 5, 7]), [WARPS, EIGHTS * 8, 64])


# --- units ------------------------------------------------------------------------------------------------------------


@gluon.jit
def next_stage(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _of_rows(shared):
    """Scales or zeros of both groups of a span, [warps, 16 rows]. Permuted here: Triton (3.6) would not, in memory."""
    found = gl.permute(shared.load(STORED).to(gl.int32), [1, 0])
    return gl.convert_layout(found, OF_ROWS, assert_trivial=True)


@gluon.jit
def unit_of(ring, slot, unit: gl.constexpr):
    """The words, scales and zeros of unit 0 or 1 of a stage."""
    ws, ss, zs, full, empty = ring
    found = (ws.index(slot * 2 + unit).load(W_TILE), _of_rows(ss.index(slot * 2 + unit)))  # type: tuple
    if zs.dtype == gl.int16:
        found += (_of_rows(zs.index(slot * 2 + unit)),)
    return found


@gluon.jit
def first_unit(ring, slot, phase, pred):
    """Unit 0 of a stage, once its data has arrived. If not `pred`, it does not wait and the values are undefined."""
    mbarrier.wait(ring[3].index(slot), phase, pred=pred)
    return unit_of(ring, slot, 0)


@gluon.jit
def release(ring, slot, phase):
    """Release a stage to the load warp when all warps have read it. Returns the next slot and its phase."""
    _barrier()
    mbarrier.arrive(ring[4].index(slot), count=1)
    return next_stage(slot, phase, ring[3].shape[0])


# --- inputs -----------------------------------------------------------------------------------------------------------


@gluon.jit
def inputs_of(x, stride, M, piece):
    """A warp's span of x in words of two items, [warps, 8 rows, 32 words] for each pair; zeros past the last row."""
    m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, X_TILE)))
    inside = gl.expand_dims(gl.expand_dims(m < M, 0), 2)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X_TILE)))
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, X_TILE)))
    pointers = x.to(gl.pointer_type(gl.int32), bitcast=True)
    pointers += gl.expand_dims(gl.expand_dims(m * (stride // 2), 0), 2)
    pointers += gl.expand_dims(gl.expand_dims(warp * 128, 1), 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    found = ()  # type: tuple
    for pair in gl.static_range(4):
        # not from L1, which does not see what other programs have written
        from_pair = pointers + (piece * (WARPS * 128) + pair * 32)
        found += (gl.load(from_pair, mask=inside, other=0, cache_modifier=".cg"),)
    return found


@gluon.jit
def right_operand(words, ITEM: gl.constexpr):
    b = gl.permute(_in_mma_order(words, ITEM), [0, 2, 1])
    return gl.convert_layout(b, RIGHT, assert_trivial=True)


@gluon.jit
def scaled(words, PAIR: gl.constexpr, ITEM: gl.constexpr):
    factor = gl.full(words.shape, (EVEN if PAIR % 2 == 0 else ODD) * 65537, gl.int32, words.type.layout)
    return times2(words, factor, ITEM)


@gluon.jit
def totals_of(bs, ITEM: gl.constexpr):
    """For both groups of a span, the sum of their inputs in every row of a tile."""
    nothing = gl.zeros([WARPS, 16, ROWS], gl.float32, MMA)
    found = ()  # type: tuple
    for group in gl.static_range(2):
        even = mma_v2(gl.full([WARPS, 16, 64], 1, gl.int16, LEFT).to(ITEM, bitcast=True), bs[2 * group], nothing)
        odd = mma_v2(gl.full([WARPS, 16, 64], 16, gl.int16, LEFT).to(ITEM, bitcast=True), bs[2 * group + 1], nothing)
        found += (even + odd,)
    return found


# --- products ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _numbers(words, PAIR: gl.constexpr, ITEM: gl.constexpr):
    """Pair PAIR of each word as a left operand, times 2^-133, or 2^-129 if it is an odd one."""
    words = words if PAIR < 2 else words >> 8
    words = words & (0x000F000F if PAIR % 2 == 0 else 0x00F000F0)
    return gl.convert_layout(_in_mma_order(words, ITEM), LEFT, assert_trivial=True)


@gluon.jit
def product(unit, inputs, y, ITEM: gl.constexpr):
    bs, totals = inputs
    nothing = gl.zeros([WARPS, 16, ROWS], gl.float32, MMA)
    for group in gl.static_range(2):
        # two sums: a product does not wait for the one before it
        even = mma_v2(_numbers(unit[0], 2 * group, ITEM), bs[2 * group], nothing)
        odd = mma_v2(_numbers(unit[0], 2 * group + 1, ITEM), bs[2 * group + 1], nothing)
        sums = even + odd
        if len(unit) == 3:
            bits = ((unit[2] >> (8 * group)) & 255) | 0x4B000000  # 2^23 + zero
            sums -= totals[group] * gl.expand_dims(bits.to(gl.float32, bitcast=True) - 8388608.0, 2)
        else:
            sums -= totals[group] * 8.0
        factor = (unit[1] >> (16 * group)).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        y += sums * gl.expand_dims(factor, 2)
    return y
