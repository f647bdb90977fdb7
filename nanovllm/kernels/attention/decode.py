"""Paged decode attention in one launch: norm, rotate, store the new key and value, attend, and merge.

decode_plan.py describes how the work is divided into segments of one (sequence, KV head) each. A program that has only
a part of a (sequence, KV head) writes its softmax state to the workspace, and the last one to finish merges them.
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
from nanovllm.kernels.attention.decode_segment import attend_segment, prefetch_segment
from nanovllm.kernels.attention.decode_workspace import DecodeWorkspace, finish
from nanovllm.kernels.attention.new_token import new_heads
from nanovllm.kernels.attention.prefill import paged_prefill_reference
from nanovllm.kernels.attention.rope_store import rope_store_reference
from nanovllm.kernels.launch import launch


def paged_decode_reference(
    qkv: torch.Tensor,  # [batch, heads + 2 * kv_heads, head_dim]
    cache: torch.Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim], written
    scales: torch.Tensor | None,  # [2, num_blocks, kv_heads, block_size] of an fp8 cache, written
    *,
    rows: torch.Tensor,  # [batch]
    positions: torch.Tensor,  # [batch], -1: padding
    blocks: torch.Tensor,  # [num_rows, max_blocks]
    q_norm: torch.Tensor | None,  # [head_dim]
    k_norm: torch.Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:  # [batch, heads * head_dim]
    """Store the new keys and values, then attend as prefill does with chunks of one token."""
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
        scale=scale,
        sinks=sinks,
        out=out,
    )
    return out


@triton.jit(do_not_specialize=["batch", "num_blocks", "blocks_stride"])
def _decode_kernel(
    qkv,
    cache,
    scales,
    rows,
    positions,
    blocks,
    prefix,
    partial_acc,
    partial_max,
    partial_sum,
    arrived,
    q_norm,
    k_norm,
    sinks,
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
    SCALE: tl.constexpr,  # of the scores before the softmax
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,  # one split: compile no merge, which saves registers
    BATCH_COLS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    DOT_ROWS: tl.constexpr = max(8, triton.next_power_of_2(GROUP))  # tl.dot takes at least eight
    HEADS: tl.constexpr = GROUP * KV_HEADS
    # Numbers merged at a time: as many as registers allow, because fixed splits leave many partial results.
    FIXED_MERGED: tl.constexpr = 8192 if GROUP <= 4 else 2048
    scale_offset = num_blocks.to(tl.int64) * (KV_HEADS * BLOCK_SIZE)
    value_offset = scale_offset * HEAD_DIM
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    if prefix is None:
        # Fixed splits: program (i, j) takes the j-th of equal segments of the i-th (sequence, KV head). Loads that
        # depend on no other load are issued first.
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
        tiles_per_split = tl.maximum(tl.cdiv(tiles, splits), 1)
        begin = split * tiles_per_split
        end = tl.minimum(begin + tiles_per_split, tiles)
        tile_begin = (first // TILE + begin) * TILE
        tile_end = (first // TILE + end) * TILE
        prefetch_segment(
            cache, value_offset, table, tile_begin, tile_end, head, first, position,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, INTERPRETED,
        )  # fmt: skip
        if begin < end:
            acc, maximum, total_weight = attend_segment(
                q, q_swapped, k, k_swapped, v, cache, scales, table, q_norm, k_norm, sinks, cos_sin, eps,
                head, first, position, tile_begin, tile_end, end == tiles, scale_offset,
                GROUP, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SCALE, TILE, INTERPRETED, DOT_ROWS,
            )  # fmt: skip
            first_partial = pair * splits
            finish(
                acc, maximum, total_weight, partial_acc, partial_max, partial_sum, arrived + pair,
                out + (seq.to(tl.int64) * HEADS + head * GROUP) * HEAD_DIM,
                first_partial + split, WHOLE or tiles_per_split >= tiles,
                first_partial, first_partial + tl.cdiv(tiles, tiles_per_split) - 1, False,
                1, FIXED_MERGED, GROUP, HEAD_DIM,
            )  # fmt: skip
    else:
        program = tl.program_id(0)
        total = tl.load(prefix + batch) * KV_HEADS
        i = tl.arange(0, BATCH_COLS)
        ends = tl.load(prefix + 1 + i, mask=i < batch, other=2147483647 // KV_HEADS) * KV_HEADS
        units_per_program = total // tl.num_programs(0)
        rest = total % tl.num_programs(0)
        begin = first_unit(program, units_per_program, rest)
        end = first_unit(program + 1, units_per_program, rest)
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
            prefetch_segment(
                cache, value_offset, table, from_tile * TILE, to_tile * TILE, first_head, first, position,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, INTERPRETED,
            )  # fmt: skip
            for head in range(first_head, last_head + 1):
                head_begin = seq_begin + head * tiles
                head_end = head_begin + tiles
                segment_begin = tl.maximum(head_begin, begin)
                segment_end = tl.minimum(head_end, end)
                q, q_swapped, k, k_swapped, v = new_heads(qkv, seq, head, GROUP, KV_HEADS, HEAD_DIM, DOT_ROWS)
                acc, maximum, total_weight = attend_segment(
                    q, q_swapped, k, k_swapped, v, cache, scales, table, q_norm, k_norm, sinks, cos_sin, eps,
                    head, first, position, (first_tile + segment_begin - head_begin) * TILE,
                    (first_tile + segment_end - head_begin) * TILE, segment_end == head_end, scale_offset,
                    GROUP, KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SCALE, TILE, INTERPRETED, DOT_ROWS,
                )  # fmt: skip
                prefetch_segment(
                    cache, value_offset, table, first_tile * TILE, (first_tile + seq_end - segment_end) * TILE,
                    tl.minimum(head + 1, last_head), first, position,
                    KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, INTERPRETED,
                )  # fmt: skip
                first_program = program_of(head_begin, units_per_program, rest)
                finish(
                    acc, maximum, total_weight, partial_acc, partial_max, partial_sum, arrived + seq * KV_HEADS + head,
                    out + (seq.to(tl.int64) * HEADS + head * GROUP) * HEAD_DIM,
                    2 * program + (segment_begin > begin).to(tl.int32), segment_end - segment_begin == tiles,
                    first_program, program_of(head_end - 1, units_per_program, rest),
                    first_unit(first_program, units_per_program, rest) < head_begin,
                    2, 2048, GROUP, HEAD_DIM,
                )  # fmt: skip
            unit = seq_end


def paged_decode(
    qkv: torch.Tensor,  # [batch, heads + 2 * kv_heads, head_dim], before norm and rotation
    cache: torch.Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim]
    scales: torch.Tensor | None,  # [2, num_blocks, kv_heads, block_size] bfloat16, of an fp8 cache
    *,
    rows: torch.Tensor,  # [batch] int32
    positions: torch.Tensor,  # [batch] int32, -1: padding
    blocks: torch.Tensor,  # [num_rows, max_blocks] int32
    prefix: torch.Tensor | None,  # [batch + 1] int32, from plan_decode with this tile and window; stream-K only
    workspace: DecodeWorkspace,
    q_norm: torch.Tensor | None,  # [head_dim]
    k_norm: torch.Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32
    window: int | None,
    scale: float,  # of the scores before the softmax
    sinks: torch.Tensor | None = None,  # [heads]: a logit of each that adds nothing
    out: torch.Tensor,  # [batch, heads * head_dim]; padding rows are not written
    config: DecodeConfig,
    pdl: bool,
    early: bool | None = None,
) -> torch.Tensor:
    """Store each sequence's newest key and value in the cache, and attend to the cache.

    With `pdl` the next kernel may start when all programs of this one have; with `early`, which is as `pdl` if not
    given, this one may start before the kernel before it has ended.
    """
    early = pdl if early is None else early
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
        sinks,
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
        SCALE=scale,
        TILE=config.tile,
        # only for fp8: 16-bit caches are read at memory bandwidth without it
        WHOLE=config.splits == 1 and scales is not None,
        BATCH_COLS=1 if config.splits else padded_batch(batch),
        INTERPRETED=not isinstance(_decode_kernel, triton.JITFunction),
        EARLY=early,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=early,
    )
    return out
