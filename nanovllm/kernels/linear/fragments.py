"""Load tiles from global memory directly into tensor-core fragments, without shared memory or barriers.

An mma operand of 16-bit items is distributed over a warp: thread 4 r + l holds row r and eight of every 32 columns. The
product does not depend on the order of the columns, as long as both operands use the same one. Here a thread's eight
columns are adjacent in memory: 16 bytes, one load of four 32-bit words with two items each.

A tile is therefore loaded with the axes [4 lanes, 8 rows, warp, eight rows, chunk, 4 words]. Triton (3.6) assigns the
last axis to one thread, the first two to the lanes of a warp and the third to the warps, so reshaping the tile to rows
and columns moves no data between threads. With a compiler that assigns them differently the result is the same, only
slower.
"""

import triton
import triton.language as tl


@triton.jit
def axis(SIZE: tl.constexpr, AXIS: tl.constexpr, AXES: tl.constexpr):
    """tl.arange(0, SIZE) along axis AXIS of a tensor with AXES axes."""
    x = tl.arange(0, SIZE)
    for other in tl.static_range(AXES):
        if other != AXIS:
            x = tl.expand_dims(x, other)
    return x


@triton.jit
def rows_of(EIGHTS: tl.constexpr):
    """The row of each word in a tile of EIGHTS * 8 rows."""
    return axis(EIGHTS, 3, 6) * 8 + axis(8, 1, 6)


@triton.jit
def words_of(WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """The index within its row of each word; the columns of consecutive warps are adjacent."""
    return axis(WARPS, 2, 6) * (CHUNKS * 16) + axis(CHUNKS, 4, 6) * 16 + axis(4, 0, 6) * 4 + axis(4, 5, 6)


@triton.jit
def halves(x, ITEM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Split each 32-bit word into its two 16-bit items."""
    if INTERPRETED:
        low = (x & 0xFFFF).to(tl.int16)
        high = (x >> 16).to(tl.int16)
    else:
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(tl.int16, tl.int16), is_pure=True, pack=1
        )
    return low.to(ITEM, bitcast=True), high.to(ITEM, bitcast=True)


@triton.jit
def word(low, high):
    return (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def operand(x, ITEM: tl.constexpr, DOT_TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Reshape a loaded tile to [warp, row, column], with columns in the order that the mma instruction expects."""
    low, high = halves(x, ITEM, INTERPRETED)
    return in_mma_order(tl.join(low, high).to(DOT_TYPE))


@triton.jit
def in_mma_order(x):
    """`operand` of a tile whose words have been split into items, a last axis of two."""
    WARPS: tl.constexpr = x.shape[2]
    EIGHTS: tl.constexpr = x.shape[3]
    CHUNKS: tl.constexpr = x.shape[4]
    x = tl.reshape(x, (4, 8, WARPS, EIGHTS, CHUNKS, 2, 4))  # lane, row, warp, eight, chunk, half, item
    return tl.reshape(tl.permute(x, (2, 3, 1, 4, 5, 0, 6)), (WARPS, EIGHTS * 8, CHUNKS * 32))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def all_loads_issued(tiles):
    """Return the tiles unchanged, with a data dependency of the first on all others.

    It makes ptxas issue all loads before the first use; without it, ptxas orders load, wait and multiply tile by tile.
    """
    every = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        every |= tiles[i]
    every = tl.reduce(tl.reduce(tl.reduce(every, 5, _either), 4, _either), 3, _either)
    # always zero, because a popcount is at most 32, but ptxas does not know that
    zero = tl.inline_asm_elementwise(
        "popc.b32 $0, $1; shr.u32 $0, $0, 6;", "=r,r", [every], dtype=tl.int32, is_pure=True, pack=1
    )
    zero = tl.expand_dims(tl.expand_dims(tl.expand_dims(zero, 3), 4), 5)
    result = ()  # type: tuple
    for i in tl.static_range(len(tiles)):
        result += (tiles[i] | zero if i == 0 else tiles[i],)
    return result
