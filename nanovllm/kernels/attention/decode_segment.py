"""Attend to one segment of a sequence's cache: the inner loop of decode.py."""

import triton
import triton.language as tl

from nanovllm.kernels.attention.fp8 import LIFT, scale_of, scaled, unpack
from nanovllm.kernels.attention.kv_slots import block_numbers, slots_of
from nanovllm.kernels.attention.new_token import rotation, sink_scores
from nanovllm.kernels.linear.prefetch import prefetch


@triton.jit
def _is_seen(at, first, position, WINDOW: tl.constexpr):
    """Which cached positions are visible. The new token, at `position`, is handled separately."""
    if WINDOW > 0:
        return (at >= first) & (at < position)
    return at < position


@triton.jit
def prefetch_segment(
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
    """Prefetch the keys and values of a segment's first two tiles into L2."""
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
    """Prefetch the cache lines of the rows that begin at `base + items`."""
    LINE_ITEMS: tl.constexpr = 128 * 8 // base.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_DIM, LINE_ITEMS))
    line = tl.minimum(tl.arange(0, LINES) * LINE_ITEMS, HEAD_DIM - 1)
    prefetch(base + tl.where(wanted, items, 0)[:, None] + line[None, :])


@triton.jit
def attend_segment(
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
    sinks,
    cos_sin,
    eps,
    head,
    first,
    position,
    tile_begin,
    tile_end,
    newest,
    scale_offset,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DOT_ROWS: tl.constexpr,
):
    """The softmax state (accumulator, maximum, sum of weights) of one segment, positions tile_begin to tile_end.

    The `newest` segment of a (sequence, KV head) also stores the new token's key and value, and starts from a state
    that holds the new token, taken from registers, and the sinks. The tiles hold the earlier tokens.
    """
    COLS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    HALF: tl.constexpr = HEAD_DIM // 2
    FP8: tl.constexpr = scales is not None
    # The interpreter's dot does not support bfloat16.
    DOT_TYPE: tl.constexpr = tl.float32 if INTERPRETED else (tl.float16 if FP8 else cache.dtype.element_ty)
    # fp8 is loaded as 16-bit pairs of columns: the compiler loads fragments of 16-bit items with wide loads, not bytes.
    LOAD_DIM: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM
    LOAD_COLS: tl.constexpr = COLS // 2 if FP8 else COLS
    LOG2_SCALE: tl.constexpr = 1.4426950408889634 * SCALE

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
    if sinks is not None:
        sink = sink_scores(sinks, head, newest, GROUP, DOT_ROWS)
        maximum = tl.maximum(new_score, sink)
        new_weight = tl.exp2(new_score - tl.where(newest, maximum, 0.0))  # 0, where not newest
    # The products are transposed, so that queries are mma's columns, of which it takes eight, not its sixteen rows.
    weight_sums = tl.zeros((TILE, DOT_ROWS), tl.float32)  # summed over the tile after the loop
    q = q.to(DOT_TYPE)
    if FP8:
        q, odd_q = tl.split(tl.reshape(q, (DOT_ROWS, LOAD_COLS, 2)))
        odd_q = tl.trans(odd_q)
        v_even, v_odd = tl.split(tl.reshape(v_kept, (LOAD_COLS, 2)))
        acc = tl.zeros((LOAD_COLS, DOT_ROWS), tl.float32) + v_even[:, None]
        odd_acc = tl.zeros((LOAD_COLS, DOT_ROWS), tl.float32) + v_odd[:, None]
        if sinks is not None:
            odd_acc *= new_weight[None, :]
    else:
        acc = tl.zeros((LOAD_COLS, DOT_ROWS), tl.float32) + v_kept[:, None]
    if sinks is not None:
        acc *= new_weight[None, :]
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
    if sinks is not None:
        total_weight += tl.exp2(sink - maximum)
    if FP8:
        total_weight = total_weight * LIFT
        acc = tl.reshape(tl.join(tl.trans(acc), tl.trans(odd_acc)), (DOT_ROWS, COLS))
    else:
        acc = tl.trans(acc)
    return acc, maximum, total_weight
