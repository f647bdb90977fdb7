"""Decode attention over a paged cache of latents (MLA) on Hopper, for 512 latent and 64 rotated numbers in 16 bits.

The operation is that of latent_decode.py. A program attends with up to 32 heads of one sequence to a part of its
positions. It loads each tile of 64 cached vectors once, into one of two shared-memory buffers, and multiplies it twice
with wgmma: as keys with the queries, and its latents, transposed, with the weights of the softmax. The cached vectors
are the left operand of both products, because wgmma takes 64 rows there and there are fewer heads. The next tile is
loaded meanwhile, and the first one before the preceding kernel has ended, unless it has the newest token.

Written in Gluon: Triton's compiler starts the loads of the next tile after the products of this one.
Gluon has no interpreter: tests without a GPU only compile the kernel.
"""

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.launch import cdiv, launch

LATENT = gl.constexpr(512)
ROTATED = gl.constexpr(64)
TILE = gl.constexpr(64)

ROWS_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=2)

# names of Triton 3.7 and later, or of 3.6
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _block_numbers(table, token, last, BLOCK_SIZE: gl.constexpr):
    """The blocks that hold these tokens; for those after the last one, the last one's."""
    return gl.load(table + gl.minimum(token, last) // BLOCK_SIZE).to(gl.int64)


@gluon.jit
def _load_tile(latents, keys, cache, block, token, last, BLOCK_SIZE: gl.constexpr, WIDE: gl.constexpr):
    """Start loading a tile; tokens after the last one are copies of it, which get no weight."""
    SIZE: gl.constexpr = LATENT + ROTATED
    item = cache + (block * BLOCK_SIZE + gl.minimum(token, last) % BLOCK_SIZE) * SIZE
    col = gl.arange(0, LATENT, gl.SliceLayout(0, WIDE))
    _async_load(latents, item[:, None] + col[None, :])
    turn = gl.arange(0, ROTATED, gl.SliceLayout(0, WIDE))
    _async_load(keys, item[:, None] + LATENT + turn[None, :])
    async_copy.commit_group()


@gluon.jit
def _query(absorbed, head, at, head_inside, WIDE: gl.constexpr):
    """The heads' absorbed queries, [HEAD_TILE, LATENT]"""
    col = gl.arange(0, LATENT, gl.SliceLayout(0, WIDE))
    return gl.load(absorbed + at[:, None] + col[None, :], mask=head_inside[:, None], other=0.0)


@gluon.jit
def _turned(rotated, cos_sin, position, head, head_inside, QUERY: gl.constexpr, WIDE: gl.constexpr):
    """The rotated part of the heads' queries, [HEAD_TILE, ROTATED]. A number's partner is half of them away."""
    HALF: gl.constexpr = ROTATED // 2
    turn = gl.arange(0, ROTATED, gl.SliceLayout(0, WIDE))
    at = rotated + head[:, None] * QUERY
    number = gl.load(at + turn[None, :], mask=head_inside[:, None], other=0.0).to(gl.float32)
    partner = gl.load(at + ((turn + HALF) % ROTATED)[None, :], mask=head_inside[:, None], other=0.0).to(gl.float32)
    angles = cos_sin + gl.maximum(position, 0).to(gl.int64) * ROTATED + turn % HALF
    cos, sin = gl.load(angles), gl.load(angles + HALF)
    return number * cos[None, :] + partner * gl.where(turn < HALF, -sin, sin)[None, :]


@gluon.jit
def _latent_decode_hopper_kernel(
    absorbed,
    rotated,
    cache,
    rows,
    positions,
    blocks,
    cos_sin,
    out,
    sums,
    scale,
    rotated_stride,
    max_blocks,
    HEADS: gl.constexpr,
    QUERY: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_TILE: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    TYPE: gl.constexpr = cache.dtype.element_ty
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])  # rows of cache and queries
    GROUPS: gl.constexpr = num_warps // 4  # warpgroups: for the scores they divide the heads, for `acc` the latents
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, HEAD_TILE // GROUPS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HEAD_TILE, 16])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [1, num_warps], [0, 1])
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * HEAD_TILE, 16, rank=2)
    PER_HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    ROWS: gl.constexpr = gl.SliceLayout(1, WIDE)
    seq = gl.program_id(0).to(gl.int64)
    num_seqs = gl.num_programs(0).to(gl.int64)
    split = gl.program_id(2)
    first_head = gl.program_id(1) * HEAD_TILE
    position = gl.load(positions + seq)
    table = blocks + gl.load(rows + seq).to(gl.int64) * max_blocks
    length = position + 1  # 0 for padding, which has no tiles
    tiles_each = gl.cdiv(gl.cdiv(length, TILE), SPLITS)
    begin = split * tiles_each * TILE
    end = gl.minimum(length, begin + tiles_each * TILE)
    if begin < end:
        latents = gl.allocate_shared_memory(TYPE, [2, TILE, LATENT], ROWS_LAYOUT)
        keys = gl.allocate_shared_memory(TYPE, [2, TILE, ROTATED], ROWS_LAYOUT)
        token = begin + gl.arange(0, TILE, ROWS)
        block = _block_numbers(table, token, end - 1, BLOCK_SIZE)
        if PDL and begin + TILE > position:  # the kernel before may store this tile's last token
            tl.extra.cuda.gdc_wait()
        _load_tile(latents.index(0), keys.index(0), cache, block, token, end - 1, BLOCK_SIZE, WIDE)
        block = _block_numbers(table, token + TILE, end - 1, BLOCK_SIZE)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

        head = first_head + gl.arange(0, HEAD_TILE, ROWS)
        # [heads, n, LATENT], as the product of the queries with up_k is laid out
        query_at = (head.to(gl.int64) * num_seqs + seq) * LATENT
        query = _query(absorbed, head, query_at, head < HEADS, WIDE)
        turned = _turned(rotated + seq * rotated_stride, cos_sin, position, head, head < HEADS, QUERY, WIDE)
        query = gl.allocate_shared_memory(TYPE, [HEAD_TILE, LATENT], ROWS_LAYOUT, query)
        turned = gl.allocate_shared_memory(TYPE, [HEAD_TILE, ROTATED], ROWS_LAYOUT, turned.to(TYPE))
        shared_weights = gl.allocate_shared_memory(TYPE, [TILE, HEAD_TILE], WEIGHTS)

        log2_scale = scale * 1.4426950408889634
        maximum = gl.full([HEAD_TILE], float("-inf"), gl.float32, PER_HEAD)
        weight_sums = gl.zeros([TILE, HEAD_TILE], gl.float32, SCORES)  # added up over the tokens at the end
        acc = gl.zeros([LATENT, HEAD_TILE], gl.float32, ACC)
        place = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
        slot = 0
        for tile_at in range(begin, end, TILE):
            if tile_at + TILE < end:
                token += TILE
                _load_tile(
                    latents.index(1 - slot), keys.index(1 - slot), cache, block, token, end - 1, BLOCK_SIZE, WIDE
                )
                block = _block_numbers(table, token + TILE, end - 1, BLOCK_SIZE)
                async_copy.wait_group(1)
            else:
                async_copy.wait_group(0)
            fence_async_shared()
            _barrier()
            zeros = gl.zeros([TILE, HEAD_TILE], gl.float32, SCORES)
            tile = latents.index(slot)
            scores = warpgroup_mma(tile, query.permute([1, 0]), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma(keys.index(slot), turned.permute([1, 0]), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores = gl.where((tile_at + place < end)[:, None], scores * log2_scale, float("-inf"))
            new_maximum = gl.maximum(maximum, gl.max(scores, 0))
            weights = gl.exp2(scores - new_maximum[None, :])
            decay = gl.exp2(maximum - new_maximum)
            maximum = new_maximum
            shared_weights.store(weights.to(TYPE))
            weight_sums = weight_sums * decay[None, :] + weights
            fence_async_shared()
            _barrier()
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(0, ACC))[None, :]
            acc = warpgroup_mma(tile.permute([1, 0]), shared_weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()  # all warps have read the buffer that is loaded next
            slot = 1 - slot

        total = gl.sum(weight_sums, 0)
        result = acc / gl.convert_layout(total, gl.SliceLayout(0, ACC))[None, :]
        head = first_head + gl.arange(0, HEAD_TILE, gl.SliceLayout(0, OUT))
        col = gl.arange(0, LATENT, gl.SliceLayout(1, OUT))
        if SPLITS == 1:
            part = head.to(gl.int64) * num_seqs + seq
            result = gl.convert_layout(result.to(out.dtype.element_ty), OUT)
        else:  # [splits, heads, n, LATENT], and the logarithm of the sum of each
            part = (split * HEADS + head).to(gl.int64) * num_seqs + seq
            result = gl.convert_layout(result, OUT)
            logs = gl.convert_layout(maximum + gl.log2(total), gl.SliceLayout(0, OUT))
            gl.store(sums + part, logs, mask=head < HEADS)
        gl.store(out + part[None, :] * LATENT + col[:, None], result, mask=(head < HEADS)[None, :])
    else:  # a part without positions: zeros, and the logarithm of 0
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if SPLITS > 1:
            head = first_head + gl.arange(0, HEAD_TILE, gl.SliceLayout(0, OUT))
            col = gl.arange(0, LATENT, gl.SliceLayout(1, OUT))
            part = (split * HEADS + head).to(gl.int64) * num_seqs + seq
            zeros = gl.zeros([LATENT, HEAD_TILE], gl.float32, OUT)
            gl.store(out + part[None, :] * LATENT + col[:, None], zeros, mask=(head < HEADS)[None, :])
            gl.store(sums + part, gl.full([HEAD_TILE], float("-inf"), gl.float32, part.type.layout), mask=head < HEADS)


def latent_decode_hopper(
    absorbed: Tensor,  # [heads, n, 512]
    rotated: Tensor,  # [n, heads, 64], to be rotated; a view of queries of more numbers
    cache: Tensor,  # [num_blocks, block_size, 576]
    parts: Tensor,  # [splits, heads, n, 512] float32, written; one split: [heads, n, 512] of absorbed's type
    sums: Tensor,  # [splits, heads, n] float32, written; not used with one split
    *,
    rows: Tensor,  # [n] int32
    positions: Tensor,  # [n] int32, -1 = padding
    blocks: Tensor,  # [num_rows, max_blocks] int32
    cos_sin: Tensor,  # [max_position, 64] float32
    scale: float,
    splits: int,
    head_tile: int,
    pdl: bool,
) -> None:
    """See `latent_parts` in latent_decode.py."""
    num_heads, n, _ = absorbed.shape
    launch(
        _latent_decode_hopper_kernel,
        (n, cdiv(num_heads, head_tile), splits),
        absorbed,
        rotated,
        cache,
        rows,
        positions,
        blocks,
        cos_sin,
        parts,
        sums,
        scale,
        rotated.stride(0),
        blocks.stride(0),
        HEADS=num_heads,
        QUERY=rotated.stride(1),
        BLOCK_SIZE=cache.shape[1],
        HEAD_TILE=head_tile,
        SPLITS=splits,
        PDL=pdl,
        num_warps=4 if splits <= 2 else 8,  # two warpgroups finish a short part sooner
        pdl=pdl,
    )
