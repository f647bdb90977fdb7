"""Tiles that are loaded just as the tensor cores take them: no way through shared memory, no barrier.

A tensor core's operand of 16-bit items is spread over a warp: thread 4 r + l has row r, and eight of each 32 columns.
Which columns they are is a matter of names, as long as both operands agree: here a thread's are eight that lie side by
side in memory, 16 bytes, one load of four words of two items. A tile is therefore loaded with many axes, [4 lanes, 8
rows, warp, eight, chunk, 4 words], of which Triton (3.6) gives the last to a thread, the first two to the lanes of a
warp and the third to the warps; and the reshaping that makes rows and columns of it only renames what each thread holds
already. A compiler that lays tensors out otherwise computes the same, only slower.
"""

import triton
import triton.language as tl


@triton.jit
def axis(SIZE: tl.constexpr, AXIS: tl.constexpr, AXES: tl.constexpr):
    """0 to SIZE along one of AXES axes."""
    x = tl.arange(0, SIZE)
    for other in tl.static_range(AXES):
        if other != AXIS:
            x = tl.expand_dims(x, other)
    return x


@triton.jit
def rows_of(EIGHTS: tl.constexpr):
    """The row of each word of a tile with EIGHTS times eight rows."""
    return axis(EIGHTS, 3, 6) * 8 + axis(8, 1, 6)


@triton.jit
def words_of(WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """Its place among the words of a row; warps have columns side by side."""
    return axis(WARPS, 2, 6) * (CHUNKS * 16) + axis(CHUNKS, 4, 6) * 16 + axis(4, 0, 6) * 4 + axis(4, 5, 6)


@triton.jit
def halves(x, ITEM: tl.constexpr, INTERPRETED: tl.constexpr):
    """The two 16-bit items of each word."""
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
    """A loaded tile as [warp, row, column], the columns of each chunk in the order of the tensor cores."""
    WARPS: tl.constexpr = x.shape[2]
    EIGHTS: tl.constexpr = x.shape[3]
    CHUNKS: tl.constexpr = x.shape[4]
    low, high = halves(x, ITEM, INTERPRETED)
    x = tl.join(low, high).to(DOT_TYPE)
    x = tl.reshape(x, (4, 8, WARPS, EIGHTS, CHUNKS, 2, 4))  # lane, row, warp, eight, chunk, half, item
    return tl.reshape(tl.permute(x, (2, 3, 1, 4, 5, 0, 6)), (WARPS, EIGHTS * 8, CHUNKS * 32))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def all_asked_for(tiles):
    """The same tiles, but nothing can be computed with the first before the last has been asked for.

    Left to itself, ptxas lets a warp wait for a tile and multiply it before it asks for the next.
    """
    every = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        every |= tiles[i]
    every = tl.reduce(tl.reduce(tl.reduce(every, 5, _either), 4, _either), 3, _either)
    # zero, as no more than 32 bits can be set, which ptxas does not see
    nothing = tl.inline_asm_elementwise(
        "popc.b32 $0, $1; shr.u32 $0, $0, 6;", "=r,r", [every], dtype=tl.int32, is_pure=True, pack=1
    )
    nothing = tl.expand_dims(tl.expand_dims(tl.expand_dims(nothing, 3), 4), 5)
    result = ()  # type: tuple
    for i in tl.static_range(len(tiles)):
        result += (tiles[i] | nothing if i == 0 else tiles[i],)
    return result
