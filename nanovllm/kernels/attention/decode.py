"""Paged decode attention: one launch that norms, rotates, stores the new key and value, attends and merges.

decode_plan.py says how its work is cut into segments, each of one (sequence, kv head). Where a segment is only a part,
it leaves its softmax state in the workspace and the last program to arrive merges the parts.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.decode_plan import (
    DecodeConfig,
    first_unit,
    padded_batch,
    program_of,
    sequence_of,
    tile_span,
)
from nanovllm.kernels.attention.decode_workspace import (
    DecodeWorkspace,
    block_numbers,
    finish,
    new_heads,
    rotation,
    slots_of,
)
from nanovllm.kernels.attention.fp8 import LIFT, scale_of, scaled, unpack
from nanovllm.kernels.attention.prefill import paged_prefill_reference
from nanovllm.kernels.attention.rope_store import rope_store_reference
from nanovllm.kernels.launch import launch
from nanovllm.kernels.linear.prefetch import prefetch


def paged_decode_reference(
    qkv: torch.Tensor,  # [batch, heads + 2 * kv_heads, head_dim]
    cache: torch.Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim], written
    scales: torch.Tensor | None,  # [2, num_blocks, kv_heads, block_size] where the cache is fp8, written
    *,
    rows: torch.Tensor,  # [batch]
    positions: torch.Tensor,  # [batch], -1 is padding
    blocks: torch.Tensor,  # [num_rows, max_blocks]
    q_norm: torch.Tensor | None,  # [head_dim]
    k_norm: torch.Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32
    window: int | None,
) -> torch.Tensor:  # [batch, heads * head_dim]
    """Store, then attend: a chunk of one token each."""
    batch, kv_heads = qkv.shape[0], cache.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    out = qkv.new_zeros(batch, heads * cache.shape[4])
    rope_store_reference(
        qkv,
        cache,
        scales,
        rows=rows,
        positions=positions,
        blocks=blocks,
        k_norm=k_norm,
        eps=eps,
        cos_sin=cos_sin,
        num_heads=heads,
        num_kv_heads=kv_heads,
    )
    paged_prefill_reference(
        qkv,
        cache,
        scales,
        q_norm=q_norm,
        eps=eps,
        cos_sin=cos_sin,
        chunk_rows=rows,
        chunk_starts=positions,
        chunk_first_tokens=torch.arange(batch),
        chunk_num_new=torch.ones(batch, dtype=torch.int64),
        blocks=blocks,
        num_heads=heads,
        num_kv_heads=kv_heads,
        window=window,
        out=out,
    )
    return out


@triton.jit
def _is_seen(at, first, position, WINDOW: tl.constexpr):
    """Which positions of the cache take part; the new token, at `position`, does so on its own."""
    if WINDOW > 0:
        return (at >= first) & (at < position)
    return at < position


@triton.jit
def _prefetch(
    cache,
    value_offset,
    table,
    tile_begin,
    tile_end,
    head,
    first,
    position,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Asks for the cache lines of the first two tiles of a segment, so that they come while other work is done."""
    if not INTERPRETED:
        for ahead in tl.static_range(2):
            tile_at = tile_begin + ahead * TILE
            at = tile_at + tl.arange(0, TILE)
            block = block_numbers(table, tile_at, position // BLOCK_SIZE, TILE, BLOCK_SIZE)
            item = slots_of(block, tile_at, head, TILE, BLOCK_SIZE, KV_HEADS) * HEAD_DIM
            wanted = _is_seen(at, first, position, WINDOW) & (at < tile_end)
            _prefetch_lines(cache, item, wanted, HEAD_DIM)
            _prefetch_lines(cache + value_offset, item, wanted, HEAD_DIM)


@triton.jit
def _prefetch_lines(base, items, wanted, HEAD_DIM: tl.constexpr):
    """Asks for the cache lines of the rows that begin at `base + items`."""
    LINE_ITEMS: tl.constexpr = 128 * 8 // base.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_DIM, LINE_ITEMS))
    line = tl.minimum(tl.arange(0, LINES) * LINE_ITEMS, HEAD_DIM - 1)
    prefetch(base + tl.where(wanted, items, 0)[:, None] + line[None, :])


@triton.jit
def _attend(
    q_raw,
    q_swapped,
    k_raw,
    k_swapped,
    v_new,
    cache,
    scales,
    table,
    q_norm,
    k_norm,
    cos_sin,
    eps,
    head,
    first,
    position,
    tile_begin,
    tile_end,
    newest,
    scale_offset,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DOT_ROWS: tl.constexpr,
):
    """The softmax state of one segment, positions tile_begin to tile_end; the `newest` one stores the new token.

    The new token takes part from registers: it is where the state begins. The tiles hold what was before it.
    """
    COLS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    HALF: tl.constexpr = HEAD_DIM // 2
    FP8: tl.constexpr = scales is not None
    # The interpreter's dot does not know bfloat16.
    DOT_TYPE: tl.constexpr = tl.float32 if INTERPRETED else (tl.float16 if FP8 else cache.dtype.element_ty)
    # fp8 is loaded as pairs of columns: fragments of 16-bit items reach the tensor cores by wide loads, bytes do not.
    LOAD_DIM: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM
    LOAD_COLS: tl.constexpr = COLS // 2 if FP8 else COLS
    LOG2_SCALE: tl.constexpr = 1.4426950408889634 * HEAD_DIM**-0.5

    col = tl.arange(0, COLS)
    partner = (col + HALF) % HEAD_DIM
    token = tl.arange(0, TILE)
    load_col = tl.arange(0, LOAD_COLS)
    loads = cache.to(tl.pointer_type(tl.int16)) if FP8 else cache
    load_value_offset = scale_offset * LOAD_DIM
    last_block = position // BLOCK_SIZE

    # The block numbers of a tile are loaded one tile ahead of its keys and values.
    block = block_numbers(table, tile_begin, last_block, TILE, BLOCK_SIZE)
    angles = cos_sin + position.to(tl.int64) * HEAD_DIM
    cos = tl.load(angles + col % HALF)
    sin = tl.load(angles + HALF + col % HALF)
    sin = tl.where(col < HALF, -sin, sin)
    q_same, q_other = rotation(cos, sin, q_norm, col, partner, HEAD_DIM)
    k_same, k_other = rotation(cos, sin, k_norm, col, partner, HEAD_DIM)
    new_block = tl.load(table + last_block).to(tl.int64)
    if FP8:
        slots = slots_of(block, tile_begin, head, TILE, BLOCK_SIZE, KV_HEADS)
        seen = _is_seen(tile_begin + token, first, position, WINDOW)
        k_scales = tl.load(scales + slots, mask=seen, other=0.0)
        v_scales = tl.load(scales + scale_offset + slots, mask=seen, other=0.0)

    q_x = q_raw.to(tl.float32)
    q = q_x * q_same[None, :] + q_swapped.to(tl.float32) * q_other[None, :]
    if q_norm is not None:
        q *= tl.rsqrt(tl.sum(q_x * q_x, 1) / HEAD_DIM + eps)[:, None]
    q = q.to(q_raw.dtype)

    new_score = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
    v_kept = tl.zeros((COLS,), tl.float32)
    if newest:
        k_x = k_raw.to(tl.float32)
        k_new = k_x * k_same + k_swapped.to(tl.float32) * k_other
        if k_norm is not None:
            k_new *= tl.rsqrt(tl.sum(k_x * k_x, 0) / HEAD_DIM + eps)
        k_new = k_new.to(k_raw.dtype)
        new_slot = (new_block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
        new_item = cache + new_slot * HEAD_DIM + col
        if FP8:
            k_wide, v_wide = k_new.to(tl.float32), v_new.to(tl.float32)
            k_scale = scale_of(tl.max(tl.abs(k_wide), 0), INTERPRETED)
            v_scale = scale_of(tl.max(tl.abs(v_wide), 0), INTERPRETED)
            k_stored = scaled(k_wide, k_scale, INTERPRETED).to(tl.float8e4nv)
            v_stored = scaled(v_wide, v_scale, INTERPRETED).to(tl.float8e4nv)
            tl.store(scales + new_slot, k_scale)
            tl.store(scales + scale_offset + new_slot, v_scale)
            k_kept = k_stored.to(tl.float32) * k_scale.to(tl.float32)
            v_kept = v_stored.to(tl.float32) * (v_scale.to(tl.float32) * LIFT)
        else:
            k_stored = k_new.to(cache.dtype.element_ty)
            v_stored = v_new.to(cache.dtype.element_ty)
            k_kept = k_stored.to(tl.float32)
            v_kept = v_stored.to(tl.float32)
        tl.store(new_item, k_stored, mask=col < HEAD_DIM)
        tl.store(new_item + scale_offset * HEAD_DIM, v_stored, mask=col < HEAD_DIM)
        new_score = tl.sum(q.to(tl.float32) * k_kept[None, :], 1) * LOG2_SCALE

    maximum = new_score
    # The products are transposed: few queries are the tensor cores' columns, which come by eights, not by sixteens.
    weight_sums = tl.zeros((TILE, DOT_ROWS), tl.float32)  # added up across the tile after the loop
    q = q.to(DOT_TYPE)
    if FP8:
        q, odd_q = tl.split(tl.reshape(q, (DOT_ROWS, LOAD_COLS, 2)))
        odd_q = tl.trans(odd_q)
        v_even, v_odd = tl.split(tl.reshape(v_kept, (LOAD_COLS, 2)))
        acc = tl.zeros((LOAD_COLS, DOT_ROWS), tl.float32) + v_even[:, None]
        odd_acc = tl.zeros((LOAD_COLS, DOT_ROWS), tl.float32) + v_odd[:, None]
    else:
        acc = tl.zeros((LOAD_COLS, DOT_ROWS), tl.float32) + v_kept[:, None]
    q = tl.trans(q)
    for tile_at in range(tile_begin, tl.minimum(tile_end, position), TILE):
        seen = _is_seen(tile_at + token, first, position, WINDOW)
        slots = slots_of(block, tile_at, head, TILE, BLOCK_SIZE, KV_HEADS)
        key_mask, value_mask = seen[:, None], seen[None, :]
        if LOAD_COLS != LOAD_DIM:
            key_mask = key_mask & (load_col < LOAD_DIM)[None, :]
            value_mask = value_mask & (load_col < LOAD_DIM)[:, None]
        keys = tl.load(loads + slots[:, None] * LOAD_DIM + load_col[None, :], mask=key_mask, other=0)
        value_item = loads + load_value_offset + slots[None, :] * LOAD_DIM + load_col[:, None]
        values = tl.load(value_item, mask=value_mask, other=0)  # [LOAD_COLS, TILE]
        block = block_numbers(table, tile_at + TILE, last_block, TILE, BLOCK_SIZE)

        if FP8:
            keys, odd_keys = unpack(keys, DOT_TYPE, INTERPRETED)
            scores = tl.dot(keys, q)  # [TILE, DOT_ROWS]
            scores = tl.dot(odd_keys, odd_q, scores)
            scores = scores * (k_scales.to(tl.float32) * LOG2_SCALE)[:, None]
        else:
            scores = tl.dot(keys.to(DOT_TYPE), q, input_precision="ieee") * LOG2_SCALE
        scores = tl.where(seen[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        weights = tl.exp2(scores - new_maximum[None, :])
        decay = tl.exp2(maximum - new_maximum)
        weight_sums = weight_sums * decay[None, :] + weights
        maximum = new_maximum
        if FP8:
            weights = (weights * (v_scales.to(tl.float32) * LIFT)[:, None]).to(DOT_TYPE)
            slots = slots_of(block, tile_at + TILE, head, TILE, BLOCK_SIZE, KV_HEADS)
            later = _is_seen(tile_at + TILE + token, first, position, WINDOW)
            k_scales = tl.load(scales + slots, mask=later, other=0.0)
            v_scales = tl.load(scales + scale_offset + slots, mask=later, other=0.0)
            values, odd_values = unpack(values, DOT_TYPE, INTERPRETED)
            acc = tl.dot(values, weights, acc * decay[None, :])
            odd_acc = tl.dot(odd_values, weights, odd_acc * decay[None, :])
        else:
            weights = weights.to(DOT_TYPE)
            acc = tl.dot(values.to(DOT_TYPE), weights, acc * decay[None, :], input_precision="ieee")

    total_weight = tl.sum(weight_sums, 0) + tl.exp2(new_score - maximum)
    if FP8:
        total_weight = total_weight * LIFT
        acc = tl.reshape(tl.join(tl.trans(acc), tl.trans(odd_acc)), (DOT_ROWS, COLS))
    else:
        acc = tl.trans(acc)
    return acc, maximum, total_weight


@triton.jit(do_not_specialize=["batch", "num_blocks", "blocks_stride"])
def _decode_kernel(
    qkv,
    cache,
    scales,
    rows,
    positions,
    blocks,
    prefix,
    part_acc,
    part_max,
    part_sum,
    arrived,
    q_norm,
    k_norm,
    cos_sin,
    out,
    batch,
    num_blocks,
    blocks_stride,
    eps,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,  # one split: there is nothing to merge, and no registers are kept for it
    BATCH_COLS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    DOT_ROWS: tl.constexpr = max(8, triton.next_power_of_2(GROUP))  # the fewest tl.dot takes
    HEADS: tl.constexpr = GROUP * KV_HEADS
    # Fixed splits leave many parts: as many at once as registers allow; stream-K programs leave few.
    FIXED_MERGED: tl.constexpr = 8192 if GROUP <= 4 else 2048
    scale_offset = num_blocks.to(tl.int64) * (KV_HEADS * BLOCK_SIZE)
    value_offset = scale_offset * HEAD_DIM
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if prefix is None:
        # Fixed splits: program (i, j) takes the j-th equal part of the i-th (sequence, kv head). What needs no other
        # load is asked for first, what a loaded value decides comes last.
        pair = tl.program_id(0)
        split = tl.program_id(1)
        splits = tl.num_programs(1)
        seq = pair // KV_HEADS
        head = pair % KV_HEADS
        position = tl.load(positions + seq)
        row = tl.load(rows + seq)
        q, q_swapped, k, k_swapped, v = new_heads(qkv, seq, head, GROUP, KV_HEADS, HEAD_DIM, DOT_ROWS)
        table = blocks + row.to(tl.int64) * blocks_stride
        first, tiles = tile_span(position, TILE, WINDOW)
        tiles = tl.where(position < 0, 0, tiles)
        share = tl.maximum(tl.cdiv(tiles, splits), 1)
        begin = split * share
        end = tl.minimum(begin + share, tiles)
        tile_begin = (first // TILE + begin) * TILE
        tile_end = (first // TILE + end) * TILE
        _prefetch(
            cache, value_offset, table, tile_begin, tile_end, head, first, position,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, INTERPRETED,
        )  # fmt: skip
        if begin < end:
            acc, maximum, total_weight = _attend(
                q, q_swapped, k, k_swapped, v, cache, scales, table, q_norm, k_norm, cos_sin, eps,
                head, first, position, tile_begin, tile_end, end == tiles, scale_offset,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, INTERPRETED, DOT_ROWS,
            )  # fmt: skip
            first_part = pair * splits
            finish(
                acc, maximum, total_weight, part_acc, part_max, part_sum, arrived + pair,
                out + (seq.to(tl.int64) * HEADS + head * GROUP) * HEAD_DIM,
                first_part + split, WHOLE or share >= tiles, first_part, first_part + tl.cdiv(tiles, share) - 1, False,
                1, FIXED_MERGED, GROUP, HEAD_DIM, DOT_ROWS,
            )  # fmt: skip
    else:
        program = tl.program_id(0)
        total = tl.load(prefix + batch) * KV_HEADS
        i = tl.arange(0, BATCH_COLS)
        ends = tl.load(prefix + 1 + i, mask=i < batch, other=2147483647 // KV_HEADS) * KV_HEADS
        share = total // tl.num_programs(0)
        rest = total % tl.num_programs(0)
        begin = first_unit(program, share, rest)
        end = first_unit(program + 1, share, rest)
        unit = begin
        while unit < end:
            seq, seq_begin = sequence_of(ends, unit)
            position = tl.load(positions + seq)
            table = blocks + tl.load(rows + seq).to(tl.int64) * blocks_stride
            first, tiles = tile_span(position, TILE, WINDOW)
            first_tile = first // TILE
            seq_end = tl.minimum(seq_begin + tiles * KV_HEADS, end)
            first_head = (unit - seq_begin) // tiles
            last_head = (seq_end - 1 - seq_begin) // tiles
            from_tile = first_tile + unit - seq_begin - first_head * tiles
            to_tile = first_tile + tl.minimum(seq_end - seq_begin - first_head * tiles, tiles)
            _prefetch(
                cache, value_offset, table, from_tile * TILE, to_tile * TILE, first_head, first, position,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, INTERPRETED,
            )  # fmt: skip
            for head in range(first_head, last_head + 1):
                head_begin = seq_begin + head * tiles
                head_end = head_begin + tiles
                segment_begin = tl.maximum(head_begin, begin)
                segment_end = tl.minimum(head_end, end)
                q, q_swapped, k, k_swapped, v = new_heads(qkv, seq, head, GROUP, KV_HEADS, HEAD_DIM, DOT_ROWS)
                acc, maximum, total_weight = _attend(
                    q, q_swapped, k, k_swapped, v, cache, scales, table, q_norm, k_norm, cos_sin, eps,
                    head, first, position, (first_tile + segment_begin - head_begin) * TILE,
                    (first_tile + segment_end - head_begin) * TILE, segment_end == head_end, scale_offset,
                    KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, INTERPRETED, DOT_ROWS,
                )  # fmt: skip
                _prefetch(
                    cache, value_offset, table, first_tile * TILE, (first_tile + seq_end - segment_end) * TILE,
                    tl.minimum(head + 1, last_head), first, position,
                    KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, INTERPRETED,
                )  # fmt: skip
                first_program = program_of(head_begin, share, rest)
                finish(
                    acc, maximum, total_weight, part_acc, part_max, part_sum, arrived + seq * KV_HEADS + head,
                    out + (seq.to(tl.int64) * HEADS + head * GROUP) * HEAD_DIM,
                    2 * program + (segment_begin > begin).to(tl.int32), segment_end - segment_begin == tiles,
                    first_program, program_of(head_end - 1, share, rest),
                    first_unit(first_program, share, rest) < head_begin,
                    2, 2048, GROUP, HEAD_DIM, DOT_ROWS,
                )  # fmt: skip
            unit = seq_end


def paged_decode(
    qkv: torch.Tensor,  # [batch, heads + 2 * kv_heads, head_dim], neither normed nor rotated
    cache: torch.Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim]
    scales: torch.Tensor | None,  # [2, num_blocks, kv_heads, block_size] bfloat16 where the cache is fp8
    *,
    rows: torch.Tensor,  # [batch] int32
    positions: torch.Tensor,  # [batch] int32, -1 is padding
    blocks: torch.Tensor,  # [num_rows, max_blocks] int32
    prefix: torch.Tensor | None,  # [batch + 1] int32, of plan_decode with this tile and window; unused with splits
    workspace: DecodeWorkspace,
    q_norm: torch.Tensor | None,  # [head_dim]
    k_norm: torch.Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32
    window: int | None,
    out: torch.Tensor,  # [batch, heads * head_dim]; padding rows are left as they are
    config: DecodeConfig,
    pdl: bool,
) -> torch.Tensor:
    """Attends each sequence's newest token to its cache, and writes that token's key and value there."""
    _, num_blocks, kv_heads, block_size, head_dim = cache.shape
    batch = qkv.shape[0]
    heads = qkv.shape[1] - 2 * kv_heads
    assert qkv.is_contiguous() and cache.is_contiguous() and out.is_contiguous() and cos_sin.is_contiguous()
    assert heads % kv_heads == 0 and heads // kv_heads <= 16 and head_dim % 2 == 0
    assert (cache.dtype == torch.float8_e4m3fn) == (scales is not None)
    if config.splits:
        grid, slots = (batch * kv_heads, config.splits), batch * kv_heads * config.splits
    else:
        assert prefix is not None
        grid, slots = (config.num_programs, 1), 2 * config.num_programs
    assert workspace.acc.shape[0] >= slots and workspace.acc.shape[1:] == (heads // kv_heads, head_dim)
    assert workspace.arrived.shape[0] >= batch * kv_heads
    launch(
        _decode_kernel,
        grid,
        qkv,
        cache,
        scales,
        rows,
        positions,
        blocks,
        None if config.splits else prefix,
        workspace.acc,
        workspace.maxima,
        workspace.sums,
        workspace.arrived,
        q_norm,
        k_norm,
        cos_sin,
        out,
        batch,
        num_blocks,
        blocks.stride(0),
        eps,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        TILE=config.tile,
        # 16-bit caches are at the memory's speed without it, and with more programs at a time fell behind
        WHOLE=config.splits == 1 and scales is not None,
        BATCH_COLS=1 if config.splits else padded_batch(batch),
        INTERPRETED=not isinstance(_decode_kernel, triton.JITFunction),
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
    return out
