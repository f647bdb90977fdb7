"""Decode attention over a paged cache of latents (MLA), in the absorbed form: all heads read the same vectors.

A program computes some heads of one sequence over a part of its positions; a second kernel merges the parts. On Hopper
the first kernel is that of latent_decode_hopper.py where it serves.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.attention.kv_slots import block_numbers, slots_of
from nanovllm.kernels.attention.rope_store import norm_rotate_reference
from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

MAX_HEADS = 32  # of a program: its sums take heads * latent_size registers
MAX_SPLITS = 64
FEW_SPLITS = 32  # unless sequences are long: all parts are merged, also those without positions
WAVES = 2  # programs for each multiprocessor, at least
LONG_SEQUENCE = 16  # thousand positions

# of the Hopper kernel, in the time of a program for 1,000 positions
START_COST = 0.15  # of each program
MERGE_COST, MERGE_COST_EACH = 0.005, 0.0005  # of each part; of each sequence's part


def latent_decode_reference(
    absorbed: Tensor,  # [heads, n, latent_size]
    rotated: Tensor,  # [n, heads, rotated_size], to be rotated
    cache: Tensor,  # [num_blocks, block_size, latent_size + rotated_size]
    *,
    rows: Tensor,  # [n]
    positions: Tensor,  # [n], -1 = padding
    blocks: Tensor,  # [num_rows, max_blocks]
    cos_sin: Tensor,  # [max_position, rotated_size]
    scale: float,
) -> Tensor:  # [heads, n, latent_size]
    """One sequence at a time, in float64; rows of padding are zeros."""
    out = torch.zeros_like(absorbed)
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        if position < 0:
            continue
        at = torch.arange(position + 1, device=cache.device)
        keys = cache[blocks[row, at // cache.shape[1]].long(), at % cache.shape[1]].double()
        query = norm_rotate_reference(rotated[i], None, 0.0, *cos_sin[position].chunk(2, dim=-1))
        query = torch.cat([absorbed[:, i], query], dim=-1).double()
        weights = (query @ keys.T * scale).softmax(dim=-1)
        out[:, i] = (weights @ keys[:, : absorbed.shape[2]]).to(out.dtype)
    return out


@triton.jit
def _latent_decode_kernel(
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
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    QUERY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = ROTATED // 2
    SIZE: tl.constexpr = LATENT + ROTATED
    seq = tl.program_id(0).to(tl.int64)
    num_seqs = tl.num_programs(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    col, half, token = tl.arange(0, LATENT_PADDED), tl.arange(0, HALF_PADDED), tl.arange(0, TILE)
    head_inside, col_inside, inside = head < HEADS, col < LATENT, half < HALF

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + seq)
    length = position + 1  # 0 for padding, which has no tiles
    tiles_each = tl.cdiv(tl.cdiv(length, TILE), SPLITS)
    begin = split * tiles_each * TILE
    end = tl.minimum(length, begin + tiles_each * TILE)
    row = tl.load(rows + seq).to(tl.int64)
    table = blocks + row * max_blocks

    # [heads, n, LATENT], as the product of the queries with up_k is laid out
    query_at = (head.to(tl.int64) * num_seqs + seq) * LATENT
    query_mask = head_inside[:, None] & col_inside[None, :]
    query = tl.load(absorbed + query_at[:, None] + col[None, :], mask=query_mask, other=0.0)
    rotated_at = rotated + seq * rotated_stride + head[:, None] * QUERY + half[None, :]
    half_mask = head_inside[:, None] & inside[None, :]
    first = tl.load(rotated_at, mask=half_mask, other=0.0).to(tl.float32)
    second = tl.load(rotated_at + HALF, mask=half_mask, other=0.0).to(tl.float32)
    angles = cos_sin + tl.maximum(position, 0).to(tl.int64) * ROTATED + half
    cos = tl.load(angles, mask=inside, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=inside, other=0.0)[None, :]
    turned_1 = (first * cos - second * sin).to(query.dtype)
    turned_2 = (second * cos + first * sin).to(query.dtype)

    log2_scale = scale * 1.4426950408889634
    maximum = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    acc = tl.zeros((HEAD_TILE, LATENT_PADDED), tl.float32)
    # the block numbers of a tile are loaded one tile ahead of its latents
    last_block = tl.maximum(position, 0) // BLOCK_SIZE
    block = block_numbers(table, begin, last_block, TILE, BLOCK_SIZE)
    for tile_at in range(begin, end, TILE):
        seen = tile_at + token < end
        item = cache + slots_of(block, tile_at, 0, TILE, BLOCK_SIZE, 1) * SIZE
        block = block_numbers(table, tile_at + TILE, last_block, TILE, BLOCK_SIZE)
        latents = tl.load(item[:, None] + col[None, :], mask=seen[:, None] & col_inside[None, :], other=0.0)
        key_at = item[:, None] + LATENT + half[None, :]
        key_mask = seen[:, None] & inside[None, :]
        key_1 = tl.load(key_at, mask=key_mask, other=0.0).to(query.dtype)
        key_2 = tl.load(key_at + HALF, mask=key_mask, other=0.0).to(query.dtype)
        latents = latents.to(query.dtype)
        scores = tl.dot(query, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(turned_1, tl.trans(key_1), scores, input_precision="ieee")
        scores = tl.dot(turned_2, tl.trans(key_2), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * log2_scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(query.dtype), latents, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum

    total = tl.where(end > begin, total, 1.0)
    result = acc / total[:, None]
    if SPLITS == 1:
        mask = (head < tl.where(end > begin, HEADS, 0))[:, None] & col_inside[None, :]
        tl.store(out + query_at[:, None] + col[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        # [splits, heads, n, LATENT], and the logarithm of the sum of each; a part without positions has zeros and the
        # logarithm of 0
        part = (split.to(tl.int64) * HEADS + head) * num_seqs + seq
        tl.store(out + part[:, None] * LATENT + col[None, :], result, mask=query_mask)
        tl.store(sums + part, maximum + tl.log2(total), mask=head_inside)


@triton.jit
def _latent_merge_kernel(
    parts,
    sums,
    positions,
    out,
    num_heads,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    num_seqs = tl.num_programs(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(positions + seq) >= 0:
        col, split = tl.arange(0, LATENT_PADDED), tl.arange(0, SPLITS)
        part = (split.to(tl.int64) * num_heads + head) * num_seqs + seq
        logs = tl.load(sums + part)
        weights = tl.exp2(logs - tl.max(logs, 0))
        values = tl.load(parts + part[:, None] * LATENT + col[None, :], mask=(col < LATENT)[None, :], other=0.0)
        merged = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
        target = out + (head * num_seqs + seq) * LATENT + col
        tl.store(target, merged.to(out.dtype.element_ty), mask=col < LATENT)


def num_splits(num_seqs: int, num_heads: int, *, num_sms: int, hopper: bool = False, long: bool = False) -> int:
    """Parts of each sequence, a power of two, so that every multiprocessor has work. `long`: the sequences are."""
    programs = num_seqs * cdiv(num_heads, head_tile(num_heads))
    if not hopper:
        return min(next_power_of_2(cdiv(WAVES * num_sms, programs)), MAX_SPLITS if long else FEW_SPLITS)
    length = LONG_SEQUENCE if long else 1

    def cost(splits: int) -> float:  # a multiprocessor runs one program at a time
        merge = (MERGE_COST + MERGE_COST_EACH * num_seqs) * splits if splits > 1 else 0.0
        return cdiv(programs * splits, num_sms) * (length / splits + START_COST) + merge

    return min((1 << exponent for exponent in range(MAX_SPLITS.bit_length())), key=cost)


def head_tile(num_heads: int) -> int:
    return min(max(next_power_of_2(num_heads), 16), MAX_HEADS)


def latent_decode(
    absorbed: Tensor,  # [heads, n, latent_size]
    rotated: Tensor,  # [n, heads, rotated_size], to be rotated; a view of queries of more numbers
    cache: Tensor,  # [num_blocks, block_size, latent_size + rotated_size]
    *,
    positions: Tensor,  # [n] int32, -1 = padding
    splits: int,  # parts of each sequence, a power of two
    pdl: bool = False,
    **others: Any,  # as for `latent_parts`
) -> Tensor:  # [heads, n, latent_size]
    """What each head gathers of the latents; rows of padding are not written. The newest tokens are in the cache."""
    parts, sums = latent_parts(absorbed, rotated, cache, positions=positions, splits=splits, pdl=pdl, **others)
    if splits == 1:
        return parts
    num_heads, n, latent_size = absorbed.shape
    out = torch.empty_like(absorbed)
    launch(
        _latent_merge_kernel,
        (n, num_heads),
        parts,
        sums,
        positions,
        out,
        num_heads,
        LATENT=latent_size,
        LATENT_PADDED=next_power_of_2(latent_size),
        SPLITS=splits,
        PDL=pdl,
        num_warps=8,
        pdl=pdl,
    )
    return out


def latent_parts(
    absorbed: Tensor,  # [heads, n, latent_size]
    rotated: Tensor,  # [n, heads, rotated_size], to be rotated; a view of queries of more numbers
    cache: Tensor,  # [num_blocks, block_size, latent_size + rotated_size]
    *,
    rows: Tensor,  # [n] int32
    positions: Tensor,  # [n] int32, -1 = padding
    blocks: Tensor,  # [num_rows, max_blocks] int32
    cos_sin: Tensor,  # [max_position, rotated_size] float32
    scale: float,
    splits: int,  # parts of each sequence, a power of two
    hopper: bool = False,  # use the kernel of latent_decode_hopper.py
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """The parts, [splits, heads, n, latent_size] float32, and the logarithms to base 2 of their sums, [splits, heads,
    n] float32, which say how much each part counts. One part is the result, [heads, n, latent_size] of absorbed's type.
    """
    num_heads, n, latent_size = absorbed.shape
    rotated_size = cos_sin.shape[1]
    assert absorbed.is_contiguous() and cache.is_contiguous() and blocks.stride(1) == rotated.stride(2) == 1
    parts = sums = torch.empty_like(absorbed)
    if splits > 1:
        parts = torch.empty(splits, *absorbed.shape, dtype=torch.float32, device=absorbed.device)
        sums = torch.empty(splits, num_heads, n, dtype=torch.float32, device=absorbed.device)
    if hopper:
        from nanovllm.kernels.attention.latent_decode_hopper import latent_decode_hopper

        latent_decode_hopper(
            absorbed, rotated, cache, parts, sums, rows=rows, positions=positions, blocks=blocks, cos_sin=cos_sin,
            scale=scale, splits=splits, head_tile=head_tile(num_heads), pdl=pdl,
        )  # fmt: skip
        return parts, sums
    half_type = absorbed.dtype.itemsize == 2
    launch(
        _latent_decode_kernel,
        (n, cdiv(num_heads, head_tile(num_heads)), splits),
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
        LATENT=latent_size,
        ROTATED=rotated_size,
        QUERY=rotated.stride(1),
        BLOCK_SIZE=cache.shape[1],
        TILE=32 if half_type else 16,
        HEAD_TILE=head_tile(num_heads),
        LATENT_PADDED=max(next_power_of_2(latent_size), 16),
        HALF_PADDED=max(next_power_of_2(rotated_size // 2), 16),
        SPLITS=splits,
        PDL=pdl,
        num_warps=8,
        num_stages=3 if half_type else 2,
        pdl=pdl,
    )
    return parts, sums
