"""Paged decode attention for a few sequences, where the way to the first key takes longer than all that is read.

Every (sequence, kv head) has several programs; program j takes tiles j, j + splits, ... of its sequence. The first of
them is then known without the position, so that its keys and values, which earlier steps have written, are on their way
while the kernel before still computes the new token. They go to registers, the next tile's while the present one is
used. The new token is normed, rotated and stored by the program with the least to do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels import launch
from nanovllm.kernels.decode_parts import DecodeWorkspace, block_numbers, finish, new_heads, rotation, slots_of

TILE = 32
MAX_PAIRS = 128  # (sequence, kv head); where there are more, decode_attention's deeper pipeline is faster
MAX_PROGRAMS = 512


def small_batch_serves(*, head_dim: int, cache_dtype: torch.dtype) -> bool:
    """Whether keys and values are such that they fit the registers: 16 bits, heads of a power of two."""
    return cache_dtype in (torch.bfloat16, torch.float16) and head_dim in (16, 32, 64, 128, 256)


def small_batch_splits(pairs: int) -> int:
    """Programs for each of so many (sequence, kv head): what measured best on an H200."""
    return min(16 if pairs <= 16 else 8, MAX_PROGRAMS // pairs)


@triton.jit(do_not_specialize=["num_blocks", "max_blocks"])
def _small_batch_kernel(
    qkv,
    cache,
    positions,
    tables,
    part_acc,
    part_max,
    part_sum,
    arrived,
    q_norm,
    k_norm,
    cos_sin,
    out,
    num_blocks,
    max_blocks,
    eps,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    DOT_ROWS: tl.constexpr = 16  # the fewest tl.dot takes
    # The interpreter's dot does not know bfloat16.
    DOT_TYPE: tl.constexpr = tl.float32 if INTERPRETED else cache.dtype.element_ty
    LOG2_SCALE: tl.constexpr = 1.4426950408889634 * HEAD_DIM**-0.5
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    stride = splits * TILE
    seq = pair // KV_HEADS
    head = pair % KV_HEADS
    table = tables + seq.to(tl.int64) * max_blocks
    value_offset = num_blocks.to(tl.int64) * (KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    col = tl.arange(0, HEAD_DIM)
    token = tl.arange(0, TILE)

    # Before the wait, nothing that this step writes: the first tile as it lies there, the second one's block numbers.
    tile_begin = split * TILE
    block = block_numbers(table, tile_begin, max_blocks - 1, TILE, BLOCK_SIZE)
    slots = slots_of(block, tile_begin, head, TILE, BLOCK_SIZE, KV_HEADS)
    items = cache + slots[:, None] * HEAD_DIM + col[None, :]
    keys = tl.load(items)
    values = tl.load(items + value_offset)
    block = block_numbers(table, tile_begin + stride, max_blocks - 1, TILE, BLOCK_SIZE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    position = tl.load(positions + seq)
    q, q_swapped, k, k_swapped, v = new_heads(qkv, seq, head, GROUP, KV_HEADS, HEAD_DIM, DOT_ROWS)
    tiles = tl.cdiv(position, TILE)  # of what was before the new token
    parts = tl.minimum(tl.maximum(tiles, 1), splits)
    if (split < parts) & (position >= 0):
        partner = (col + HALF) % HEAD_DIM
        angles = cos_sin + position.to(tl.int64) * HEAD_DIM
        cos = tl.load(angles + col % HALF)
        sin = tl.load(angles + HALF + col % HALF)
        sin = tl.where(col < HALF, -sin, sin)
        same, other = rotation(cos, sin, q_norm, col, partner, HEAD_DIM)
        q_x = q.to(tl.float32)
        q_new = q_x * same[None, :] + q_swapped.to(tl.float32) * other[None, :]
        if q_norm is not None:
            q_new *= tl.rsqrt(tl.sum(q_x * q_x, 1) / HEAD_DIM + eps)[:, None]
        q_new = q_new.to(qkv.dtype.element_ty)

        new_score = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
        acc = tl.zeros((DOT_ROWS, HEAD_DIM), tl.float32)
        if split == tl.where(tiles >= splits, tiles % splits, parts - 1):
            same, other = rotation(cos, sin, k_norm, col, partner, HEAD_DIM)
            k_x = k.to(tl.float32)
            k_new = k_x * same + k_swapped.to(tl.float32) * other
            if k_norm is not None:
                k_new *= tl.rsqrt(tl.sum(k_x * k_x, 0) / HEAD_DIM + eps)
            k_new = k_new.to(qkv.dtype.element_ty).to(cache.dtype.element_ty)
            v_new = v.to(cache.dtype.element_ty)
            new_block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            new_slot = (new_block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(cache + new_slot * HEAD_DIM + col, k_new)
            tl.store(cache + value_offset + new_slot * HEAD_DIM + col, v_new)
            new_score = tl.sum(q_new.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * LOG2_SCALE
            acc += v_new.to(tl.float32)[None, :]

        maximum = new_score
        weight_sums = tl.zeros((DOT_ROWS, TILE), tl.float32)  # added up across the tile after the loop
        q_new = q_new.to(DOT_TYPE)
        # What lies past the end is somebody else's, and may be NaN.
        values = tl.where((tile_begin + token < position)[:, None], values, 0.0)
        for tile_at in range(tile_begin, position, stride):
            next_at = tile_at + stride
            slots = slots_of(block, next_at, head, TILE, BLOCK_SIZE, KV_HEADS)
            items = cache + slots[:, None] * HEAD_DIM + col[None, :]
            wanted = (next_at + token < position)[:, None]
            next_keys = tl.load(items, mask=wanted, other=0.0)
            next_values = tl.load(items + value_offset, mask=wanted, other=0.0)
            block = block_numbers(table, next_at + stride, max_blocks - 1, TILE, BLOCK_SIZE)

            scores = tl.dot(q_new, tl.trans(keys.to(DOT_TYPE))) * LOG2_SCALE
            scores = tl.where((tile_at + token < position)[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - new_maximum[:, None])
            decay = tl.exp2(maximum - new_maximum)
            weight_sums = weight_sums * decay[:, None] + weights
            maximum = new_maximum
            acc = tl.dot(weights.to(DOT_TYPE), values.to(DOT_TYPE), acc * decay[:, None])
            keys = next_keys
            values = next_values
        total_weight = tl.sum(weight_sums, 1) + tl.exp2(new_score - maximum)
        first_part = pair * splits
        finish(
            acc, maximum, total_weight, part_acc, part_max, part_sum, arrived + pair,
            out + pair.to(tl.int64) * (GROUP * HEAD_DIM),
            first_part + split, parts == 1, first_part, first_part + parts - 1, False,
            1, 4096, GROUP, HEAD_DIM, DOT_ROWS,
        )  # fmt: skip


def small_batch_decode(
    qkv: Tensor,  # [batch, heads + 2 * kv_heads, head_dim], neither normed nor rotated
    cache: Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim]
    *,
    positions: Tensor,  # [batch] int32, -1 is padding
    tables: Tensor,  # [batch, max_blocks] int32: each sequence's blocks, then any that may be read
    workspace: DecodeWorkspace,
    q_norm: Tensor | None,  # [head_dim]
    k_norm: Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: Tensor,  # [max_position, head_dim] float32
    out: Tensor,  # [batch, heads * head_dim]; padding rows are left as they are
    splits: int,
    pdl: bool,
) -> Tensor:
    """Attends each sequence's newest token to its cache, and writes that token's key and value there.

    With `pdl`, `tables` and all but the newest token's keys and values must have been written before the last kernel
    that starts the next one only after its own wait.
    """
    _, num_blocks, kv_heads, block_size, head_dim = cache.shape
    batch = qkv.shape[0]
    group = (qkv.shape[1] - 2 * kv_heads) // kv_heads
    assert qkv.is_contiguous() and cache.is_contiguous() and out.is_contiguous() and cos_sin.is_contiguous()
    assert group <= 16 and small_batch_serves(head_dim=head_dim, cache_dtype=cache.dtype)
    assert tables.is_contiguous() and tables.shape[0] == batch
    assert workspace.acc.shape[0] >= batch * kv_heads * splits and workspace.acc.shape[1:] == (group, head_dim)
    assert workspace.arrived.shape[0] >= batch * kv_heads
    launch(
        _small_batch_kernel,
        (batch * kv_heads, splits),
        qkv,
        cache,
        positions,
        tables,
        workspace.acc,
        workspace.maxima,
        workspace.sums,
        workspace.arrived,
        q_norm,
        k_norm,
        cos_sin,
        out,
        num_blocks,
        tables.shape[1],
        eps,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=TILE,
        INTERPRETED=not isinstance(_small_batch_kernel, triton.JITFunction),
        PDL=pdl,
        num_warps=4 if head_dim > 128 else 2,
        num_stages=1,  # the loop loads ahead by itself
        pdl=pdl,
    )
    return out
