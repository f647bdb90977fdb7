"""Paged decode attention for small batches, where latency rather than bandwidth is the limit.

Every (sequence, KV head) has several programs of one warp; program j takes tiles j, j + splits, ... of its sequence.
All tokens but the new one were written by earlier steps, so with programmatic dependent launch the first tiles are
loaded into registers while the previous kernel still computes the new token. The loop loads a later tile whenever it
has used one (software pipelining in registers). The program with the fewest tiles norms, rotates and stores the new
token.

Tiles are loaded directly into tensor-core fragments, without shared memory or barriers (see linear/fragments.py). A
thread loads eight adjacent columns of one token, but mma expects other elements in that thread: scattered columns of a
token for keys, four tokens of a column for values. A sum does not depend on the order of its terms, and the columns of
the result may have any known order. So the tokens and columns of a tile are renumbered (`_key_elements`,
`_value_elements`) such that each thread has loaded what mma expects from it, and a permutation that moves no data
between threads forms the matrix (`_keys`, `_values`). Queries and weights are permuted to the same order, and the
result is permuted back.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.attention.decode_workspace import MOST_TOGETHER, DecodeWorkspace, finish, finish_together
from nanovllm.kernels.attention.new_token import new_heads, rotation, sink_scores
from nanovllm.kernels.launch import launch
from nanovllm.kernels.linear.fragments import axis, halves
from nanovllm.kernels.linear.tiled import num_sms

TILE = tl.constexpr(16)  # tokens; divides the block size
QUERIES = tl.constexpr(8)  # columns of the smallest mma; a smaller group's queries are repeated
MAX_PAIRS = 128  # (sequence, KV head) pairs; for more, decode.py is faster
MAX_PROGRAMS = 1024
PROGRAMS_TOGETHER = 4  # per multiprocessor, whose registers are enough for twice as many


def small_batch_serves(*, head_dim: int, group: int, cache_dtype: torch.dtype) -> bool:
    """Whether the kernel supports these shapes: 16-bit keys and values that fit in registers, one mma per group."""
    return cache_dtype in (torch.bfloat16, torch.float16) and head_dim in (64, 128) and group <= QUERIES.value


class SmallBatchConfig(NamedTuple):
    """How the work of a (sequence, KV head) pair is divided."""

    splits: int  # programs per pair
    held: int = 1  # tiles of a program that are in flight or in registers
    together: bool = False  # all programs merge what they found, each some columns, if they run at the same time


def small_batch_config(
    pairs: int, group: int, *, window: int | None = None, sinks: bool = False, long: bool = False
) -> SmallBatchConfig:
    """What measured fastest on an H200. If one program merges, it takes the longer, the larger the group and the more
    programs there are; with windows or sinks, merging together was not measured. `long`: for sequences of 16,384 tokens
    and more, as many programs as it takes to read from memory at full speed."""
    merges = window is None and not sinks and not long
    if merges and group > 2 and pairs <= 16:
        return SmallBatchConfig(MOST_TOGETHER.value, held=2, together=True)
    most = 128 if long else 32 if pairs <= 16 and group < 4 else 16
    return SmallBatchConfig(
        min(most, MAX_PROGRAMS // pairs), held=2 if group <= 2 else 1, together=merges and group > 4
    )


# Tiles are loaded as 32-bit words of two items, because the compiler keeps 32-bit registers across iterations better
# than 16-bit ones. Of the axes below, Triton distributes the first two over the 32 lanes; the others belong to one
# thread, the last being one load.


@triton.jit
def _key_elements(HEAD_DIM: tl.constexpr):
    """Token and word of each element of [4 lanes: eight columns, 8 lanes: token, eight tokens, 32 columns, word]."""
    token = axis(TILE // 8, 2, 5) * 8 + axis(8, 1, 5)
    word = axis(HEAD_DIM // 32, 3, 5) * 16 + axis(4, 0, 5) * 4 + axis(4, 4, 5)
    return token, word


@triton.jit
def _keys(words, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, INTERPRETED: tl.constexpr):
    """[TILE, HEAD_DIM]; of every 32 columns, first the first four of each eight, then the last four of each eight."""
    x = tl.reshape(_items(words, dtype, INTERPRETED), (4, 8, TILE // 8, HEAD_DIM // 32, 2, 4))
    return tl.reshape(tl.permute(x, (2, 1, 3, 4, 0, 5)), (TILE, HEAD_DIM))


@triton.jit
def _queries(q, OWN: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Repeat and transpose [OWN, HEAD_DIM] to [HEAD_DIM, QUERIES], with columns in the order of `_keys`."""
    x = tl.reshape(q, (OWN, HEAD_DIM // 32, 4, 2, 4))  # query, 32 columns, eight, half, item
    # expand_dims, not reshape: after a reshape Triton keeps the result in shared memory and reads it for every tile
    x = tl.expand_dims(x, 0)
    x = tl.broadcast_to(x, (QUERIES // OWN, OWN, HEAD_DIM // 32, 4, 2, 4))
    return tl.reshape(tl.permute(x, (2, 4, 3, 5, 0, 1)), (HEAD_DIM, QUERIES))


@triton.jit
def _value_elements(HEAD_DIM: tl.constexpr):
    """Token and word of each element of [4 lanes: token bits 2, 1, 8 lanes: eight columns, token bits 3, 0, 64 columns,
    word]."""
    bits = axis(4, 2, 5)
    token = (bits // 2) * 8 + axis(4, 0, 5) * 2 + bits % 2
    word = axis(HEAD_DIM // 64, 3, 5) * 32 + axis(8, 1, 5) * 4 + axis(4, 4, 5)
    return token, word


@triton.jit
def _values(words, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, INTERPRETED: tl.constexpr):
    """[HEAD_DIM, TILE]; of every 64 columns, first the first of each eight, and so on; tokens by bits 2, 1, 3, 0."""
    x = tl.reshape(_items(words, dtype, INTERPRETED), (4, 8, 2, 2, HEAD_DIM // 64, 8))
    return tl.reshape(tl.permute(x, (4, 5, 1, 0, 2, 3)), (HEAD_DIM, TILE))


@triton.jit
def _weights(x):
    """Permute [TILE, QUERIES] to the token order of `_values`."""
    x = tl.reshape(x, (2, 4, 2, QUERIES))  # token bit 3, bits 2 and 1, bit 0
    return tl.reshape(tl.permute(x, (1, 0, 2, 3)), (TILE, QUERIES))


@triton.jit
def _new_value(x, HEAD_DIM: tl.constexpr):
    """Permute [HEAD_DIM] to the column order of `_values`."""
    x = tl.reshape(x, (HEAD_DIM // 64, 8, 8))  # 64 columns, eight, item
    return tl.reshape(tl.permute(x, (0, 2, 1)), (HEAD_DIM,))


@triton.jit
def _for_queries(x, OWN: tl.constexpr):
    """Repeat [OWN] to [QUERIES]."""
    return tl.reshape(tl.broadcast_to(x[None, :], (QUERIES // OWN, OWN)), (QUERIES,))


@triton.jit
def _result(acc, HEAD_DIM: tl.constexpr):
    """Transpose [HEAD_DIM, QUERIES] in the order of `_values` to [QUERIES, HEAD_DIM] in the natural order."""
    x = tl.reshape(acc, (HEAD_DIM // 64, 8, 8, QUERIES))  # 64 columns, item, eight, query
    return tl.reshape(tl.permute(x, (3, 0, 2, 1)), (QUERIES, HEAD_DIM))


@triton.jit
def _items(words, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """The two items of each word, along a new last axis."""
    low, high = halves(words, dtype, INTERPRETED)
    items = tl.join(low, high)
    return items.to(tl.float32) if INTERPRETED else items  # the interpreter's dot does not support bfloat16


@triton.jit
def _block_of(table, tile_at, last_block, BLOCK_SIZE: tl.constexpr):
    return tl.load(table + tl.minimum(tile_at // BLOCK_SIZE, last_block)).to(tl.int64)


@triton.jit
def _load_tile(
    cache,  # in words
    num_slots,
    block,
    tile_at,
    position,
    head,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Load a tile's keys and values; zeros from `position` on, where stale data may hold NaN."""
    WORDS: tl.constexpr = HEAD_DIM // 2
    slot = block * (KV_HEADS * BLOCK_SIZE) + (head * BLOCK_SIZE + tile_at % BLOCK_SIZE)
    token, word = _key_elements(HEAD_DIM)
    keys = tl.load(cache + ((slot + token) * WORDS + word), mask=tile_at + token < position, other=0)
    token, word = _value_elements(HEAD_DIM)
    values = tl.load(cache + ((num_slots + slot + token) * WORDS + word), mask=tile_at + token < position, other=0)
    return keys, values


@triton.jit
def _attend(
    q,  # [HEAD_DIM, QUERIES]
    keys,
    values,
    tile_at,
    first,  # position that is seen
    position,
    maximum,  # [QUERIES]
    weight_sums,  # [TILE, QUERIES]
    acc,  # [HEAD_DIM, QUERIES]
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add one tile to the softmax state."""
    LOG2_SCALE: tl.constexpr = 1.4426950408889634 * SCALE
    scores = tl.dot(_keys(keys, dtype, HEAD_DIM, INTERPRETED), q) * LOG2_SCALE
    token = tile_at + tl.arange(0, TILE)
    scores = tl.where(((token >= first) & (token < position))[:, None], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 0))
    weights = tl.exp2(scores - new_maximum[None, :])
    decay = tl.exp2(maximum - new_maximum)
    weight_sums = weight_sums * decay[None, :] + weights
    weights = _weights(weights.to(q.dtype))
    acc = tl.dot(_values(values, dtype, HEAD_DIM, INTERPRETED), weights, acc * decay[None, :])
    return new_maximum, weight_sums, acc


@triton.jit(do_not_specialize=["num_blocks", "max_blocks"])
def _small_batch_attention_kernel(
    qkv,
    cache,
    positions,
    tables,
    partial_acc,
    partial_max,
    partial_sum,
    arrived,
    waited,
    q_norm,
    k_norm,
    sinks,
    cos_sin,
    out,
    num_blocks,
    max_blocks,
    eps,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,  # of the scores before the softmax
    WINDOW: tl.constexpr,  # tokens that a token sees, with itself; 0: all
    HELD: tl.constexpr,  # tiles in flight or in registers
    TOGETHER: tl.constexpr,  # all programs run at the same time
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    # The number of queries, outside of the products.
    OWN: tl.constexpr = triton.next_power_of_2(GROUP)
    dtype: tl.constexpr = cache.dtype.element_ty
    LOG2_SCALE: tl.constexpr = 1.4426950408889634 * SCALE
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    stride = splits * TILE
    seq = pair // KV_HEADS
    head = pair % KV_HEADS
    table = tables + seq.to(tl.int64) * max_blocks
    last_block = max_blocks - 1
    num_slots = num_blocks.to(tl.int64) * (KV_HEADS * BLOCK_SIZE)  # of keys; the values follow
    words = cache.to(tl.pointer_type(tl.int32))
    col = tl.arange(0, HEAD_DIM)
    partner = (col + HALF) % HEAD_DIM

    # Before the wait, load only what this step's layers do not write: the first tiles, the block numbers of the next
    # ones and the rotation of the new token.
    position = tl.load(positions + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    first_tile = first // TILE * TILE
    tile_begin = first_tile + split * TILE
    blocks = ()  # type: tuple
    for i in tl.static_range(HELD):
        blocks += (_block_of(table, tile_begin + i * stride, last_block, BLOCK_SIZE),)
    keys = ()  # type: tuple
    values = ()  # type: tuple
    for i in tl.static_range(HELD):
        tile_at = tile_begin + i * stride
        tile_keys, tile_values = _load_tile(
            words, num_slots, blocks[i], tile_at, position, head, BLOCK_SIZE, KV_HEADS, HEAD_DIM
        )
        keys += (tile_keys,)
        values += (tile_values,)
    blocks = ()
    for i in tl.static_range(HELD):
        blocks += (_block_of(table, tile_begin + (HELD + i) * stride, last_block, BLOCK_SIZE),)
    angles = cos_sin + tl.maximum(position, 0).to(tl.int64) * HEAD_DIM
    cos = tl.load(angles + col % HALF)
    sin = tl.load(angles + HALF + col % HALF)
    sin = tl.where(col < HALF, -sin, sin)
    q_same, q_other = rotation(cos, sin, q_norm, col, partner, HEAD_DIM)
    k_same, k_other = rotation(cos, sin, k_norm, col, partner, HEAD_DIM)
    new_block = tl.load(table + tl.maximum(position, 0) // BLOCK_SIZE).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    q, q_swapped, k, k_swapped, v = new_heads(qkv, seq, head, GROUP, KV_HEADS, HEAD_DIM, OWN)
    tiles = tl.cdiv(position - first_tile, TILE)  # of the tokens before the new one
    used_splits = tl.minimum(tl.maximum(tiles, 1), splits)
    if (split < used_splits) & (position >= 0):
        q_x = q.to(tl.float32)
        q_new = q_x * q_same[None, :] + q_swapped.to(tl.float32) * q_other[None, :]
        if q_norm is not None:
            q_new *= tl.rsqrt(tl.sum(q_x * q_x, 1) / HEAD_DIM + eps)[:, None]
        q_new = q_new.to(qkv.dtype.element_ty)

        new_score = tl.full((OWN,), float("-inf"), tl.float32)
        new_value = tl.zeros((HEAD_DIM,), tl.float32)
        newest = split == tl.where(tiles >= splits, tiles % splits, used_splits - 1)
        if newest:
            k_x = k.to(tl.float32)
            k_new = k_x * k_same + k_swapped.to(tl.float32) * k_other
            if k_norm is not None:
                k_new *= tl.rsqrt(tl.sum(k_x * k_x, 0) / HEAD_DIM + eps)
            k_new = k_new.to(qkv.dtype.element_ty).to(dtype)
            v_new = v.to(dtype)
            new_slot = (new_block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(cache + new_slot * HEAD_DIM + col, k_new)
            tl.store(cache + (num_slots + new_slot) * HEAD_DIM + col, v_new)
            new_score = tl.sum(q_new.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * LOG2_SCALE
            new_value += v_new.to(tl.float32)

        # The softmax state starts with the new token and the sinks in one program, empty in the others.
        new_score = _for_queries(new_score, OWN)
        q_dot = _queries(q_new.to(tl.float32 if INTERPRETED else dtype), OWN, HEAD_DIM)
        maximum = new_score
        weight_sums = tl.zeros((TILE, QUERIES), tl.float32)  # summed over the tile after the loop
        acc = tl.zeros((HEAD_DIM, QUERIES), tl.float32) + _new_value(new_value, HEAD_DIM)[:, None]
        if sinks is not None:
            sink = _for_queries(sink_scores(sinks, head, newest, GROUP, OWN), OWN)
            maximum = tl.maximum(new_score, sink)
            acc *= tl.exp2(new_score - tl.where(newest, maximum, 0.0))[None, :]  # 0, where not newest
        for group_at in range(tile_begin, position, HELD * stride):
            next_keys = ()  # type: tuple
            next_values = ()  # type: tuple
            next_blocks = ()  # type: tuple
            for i in tl.static_range(HELD):
                tile_at = group_at + i * stride
                maximum, weight_sums, acc = _attend(
                    q_dot, keys[i], values[i], tile_at, first, position, maximum, weight_sums, acc,
                    dtype, HEAD_DIM, SCALE, INTERPRETED,
                )  # fmt: skip
                next_at = tile_at + HELD * stride
                tile_keys, tile_values = _load_tile(
                    words, num_slots, blocks[i], next_at, position, head, BLOCK_SIZE, KV_HEADS, HEAD_DIM
                )
                next_keys += (tile_keys,)
                next_values += (tile_values,)
                next_blocks += (_block_of(table, next_at + HELD * stride, last_block, BLOCK_SIZE),)
            keys = next_keys
            values = next_values
            blocks = next_blocks
        total_weight = tl.sum(weight_sums, 0) + tl.exp2(new_score - maximum)
        if sinks is not None:
            total_weight += tl.exp2(sink - maximum)
        first_partial = pair * splits
        out += pair.to(tl.int64) * (GROUP * HEAD_DIM)
        result = _result(acc, HEAD_DIM)
        if TOGETHER:
            finish_together(
                result, maximum, total_weight, partial_acc, partial_max, partial_sum, arrived + pair, waited + pair,
                out, first_partial, split, used_splits, GROUP, HEAD_DIM,
            )  # fmt: skip
        else:
            finish(
                result, maximum, total_weight, partial_acc, partial_max, partial_sum, arrived + pair, out,
                first_partial + split, used_splits == 1, first_partial, first_partial + used_splits - 1, False,
                1, 4096, GROUP, HEAD_DIM,
            )  # fmt: skip


def small_batch_decode(
    qkv: Tensor,  # [batch, heads + 2 * kv_heads, head_dim], before norm and rotation
    cache: Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim]
    *,
    positions: Tensor,  # [batch] int32, -1: padding
    tables: Tensor,  # [batch, max_blocks] int32: each sequence's blocks, then any valid block numbers
    workspace: DecodeWorkspace,
    q_norm: Tensor | None,  # [head_dim]
    k_norm: Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: Tensor,  # [max_position, head_dim] float32
    scale: float,  # of the scores before the softmax
    window: int | None = None,  # tokens that a token sees, with itself
    sinks: Tensor | None = None,  # [heads]: a logit of each that adds nothing
    out: Tensor,  # [batch, heads * head_dim]; padding rows are not written
    config: SmallBatchConfig,
    pdl: bool,
) -> Tensor:
    """Store each sequence's newest key and value in the cache, and attend to the cache.

    With `pdl` the kernel reads `tables`, `positions` and earlier tokens' keys and values before its wait. They must
    have been written before the last kernel that waits before it lets others start (table/embed.py).
    """
    _, num_blocks, kv_heads, block_size, head_dim = cache.shape
    batch = qkv.shape[0]
    group = (qkv.shape[1] - 2 * kv_heads) // kv_heads
    assert qkv.is_contiguous() and cache.is_contiguous() and out.is_contiguous() and cos_sin.is_contiguous()
    assert small_batch_serves(head_dim=head_dim, group=group, cache_dtype=cache.dtype) and block_size % TILE.value == 0
    assert tables.is_contiguous() and tables.shape[0] == batch
    assert workspace.acc.shape[0] >= batch * kv_heads * config.splits and workspace.acc.shape[1:] == (group, head_dim)
    assert workspace.arrived.shape[0] >= batch * kv_heads
    interpreted = not isinstance(_small_batch_attention_kernel, triton.JITFunction)
    programs = batch * kv_heads * config.splits
    launch(
        _small_batch_attention_kernel,
        (batch * kv_heads, config.splits),
        qkv,
        cache,
        positions,
        tables,
        workspace.acc,
        workspace.maxima,
        workspace.sums,
        workspace.arrived,
        workspace.waited,
        q_norm,
        k_norm,
        sinks,
        cos_sin,
        out,
        num_blocks,
        tables.shape[1],
        eps,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SCALE=scale,
        WINDOW=window or 0,
        HELD=config.held,
        # the interpreter runs one program after the other
        TOGETHER=config.together and not interpreted and programs <= PROGRAMS_TOGETHER * num_sms(),
        INTERPRETED=interpreted,
        PDL=pdl,
        num_warps=1,
        num_stages=1,  # the kernel pipelines its loads by itself
        pdl=pdl,
    )
    return out
