"""Find the cache slots of a tile's tokens through the block table."""

import triton
import triton.language as tl


@triton.jit
def block_numbers(table, tile_at, last_block, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The blocks that hold a tile's tokens: [TILE], or a scalar if a tile lies within one block."""
    if BLOCK_SIZE % TILE == 0:
        index = tile_at // BLOCK_SIZE
    elif TILE % BLOCK_SIZE == 0:
        index = tile_at // BLOCK_SIZE + tl.arange(0, TILE) // BLOCK_SIZE
    else:
        index = (tile_at + tl.arange(0, TILE)) // BLOCK_SIZE
    return tl.load(table + tl.minimum(index, last_block)).to(tl.int64)


@triton.jit
def slots_of(block, tile_at, head, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    """The cache slot of each token of a tile: its index into [blocks, kv_heads, block_size], flattened."""
    token = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE == 0:
        inner = token % BLOCK_SIZE
    elif BLOCK_SIZE % TILE == 0:
        inner = tile_at % BLOCK_SIZE + token
    else:
        inner = (tile_at + token) % BLOCK_SIZE
    return block * (KV_HEADS * BLOCK_SIZE) + (head * BLOCK_SIZE + inner)
