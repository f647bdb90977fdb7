"""Flash attention of prefill chunks over the paged cache.

A program has a tile of queries and loops over the keys once with an online softmax. The tile holds consecutive tokens
of one chunk with all query heads of one KV head (row = token * group + head), which the program norms and rotates
first. Keys and values of the prefix and of the chunk itself are read through the block table.

Where registers allow, two programs share an SM, so that the products of one hide the start and end of the other. That
matters for short prompts, whose tiles see few keys.

The kernel is deterministic: a query's bits depend on its own sequence alone. Key tiles start at multiples of `block_n`
whatever the chunk, every row executes the same instructions in every tile, and a tile that is fully masked for a row
multiplies its state by one and adds zero. One config therefore gives the same result for a whole prompt, for chunks and
for single tokens, in any batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.attention.fp8 import LIFT
from nanovllm.kernels.attention.kv_slots import block_numbers, slots_of
from nanovllm.kernels.attention.rope_store import load_halves, norm_rotate, norm_rotate_reference
from nanovllm.kernels.launch import launch, next_power_of_2


@dataclass(frozen=True)
class PrefillConfig:
    block_m: int  # rows of a query tile: tokens times the query heads of a KV head
    block_n: int  # positions of a key tile
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread


def prefill_config(*, head_dim: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> PrefillConfig:
    """The configuration that measured fastest on an H200. `group` is the number of query heads per KV head."""
    if dtype == torch.float32:
        return PrefillConfig(block_m=max(32, next_power_of_2(group)), block_n=32, num_warps=8, num_stages=1)
    quantized = cache_dtype == torch.float8_e4m3fn
    if head_dim > 128 and quantized:
        return PrefillConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillConfig(block_m=128, block_n=32, num_warps=8, num_stages=3)
    if quantized:
        return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    # small enough for two programs per SM: the products of one hide the softmax and the start of the other
    return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=128)


def query_tiles(
    starts: np.ndarray,  # [num_chunks]
    num_new: np.ndarray,  # [num_chunks]
    tokens_per_tile: int,
    num_wanted: np.ndarray | None = None,  # [num_chunks]
) -> np.ndarray:  # [num_tiles, 2] int32
    """(chunk, tile within the chunk) of every query tile, those with most keys first, so that no long one runs last.

    `num_wanted`: only tiles that have some of the last so many tokens of their chunk.
    """
    counts = -(-num_new // tokens_per_tile)
    chunks = np.repeat(np.arange(len(num_new)), counts)
    tiles = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)
    if num_wanted is not None:
        wanted = (num_wanted[chunks] > 0) & ((tiles + 1) * tokens_per_tile > (num_new - num_wanted)[chunks])
        chunks, tiles = chunks[wanted], tiles[wanted]
    num_keys = starts[chunks] + np.minimum((tiles + 1) * tokens_per_tile, num_new[chunks])
    return np.stack([chunks, tiles], axis=1)[np.argsort(-num_keys, kind="stable")].astype(np.int32)


def paged_prefill_reference(
    q_source: Tensor,  # [num_tokens, heads + 2 * kv_heads, head_dim]
    cache: Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim]
    scales: Tensor | None,  # [2, num_blocks, kv_heads, block_size]
    *,
    q_norm: Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: Tensor,  # [max_position, head_dim]
    chunk_rows: Tensor,  # [num_chunks]
    chunk_starts: Tensor,
    chunk_first_tokens: Tensor,
    chunk_num_new: Tensor,
    blocks: Tensor,  # [num_rows, max_blocks]
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,  # [heads]
    out: Tensor,  # [num_tokens, heads * head_dim]
) -> None:
    block_size = cache.shape[3]
    columns = (chunk_rows, chunk_starts, chunk_first_tokens, chunk_num_new)
    for row, start, first, num_new in zip(*(column.tolist() for column in columns), strict=True):
        if start < 0:
            continue
        positions = torch.arange(start + num_new, device=cache.device)
        block = blocks[row, positions // block_size].long()
        kv = cache[:, block, :, positions % block_size].double()  # [positions, 2, kv_heads, head_dim]
        if scales is not None:
            kv = kv * scales[:, block, :, positions % block_size].double().unsqueeze(-1)
        k, v = kv.repeat_interleave(num_heads // num_kv_heads, dim=2).unbind(1)  # [positions, heads, head_dim]
        cos, sin = cos_sin[start : start + num_new].unsqueeze(1).chunk(2, dim=-1)
        q = norm_rotate_reference(q_source[first : first + num_new, :num_heads], q_norm, eps, cos, sin).double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        distance = positions[start:, None] - positions[None, :]  # [num_new, positions]
        unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(unseen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, num_new, 1)], dim=-1)
        probabilities = scores.softmax(-1)[..., : len(positions)]
        attended = torch.einsum("hqk,khd->qhd", probabilities, v)
        out[first : first + num_new] = attended.flatten(1).to(out.dtype)


# views into a step's packed buffer have any alignment: compile one kernel for all
@triton.jit(
    do_not_specialize=["num_blocks"],
    do_not_specialize_on_alignment=["chunk_rows", "chunk_starts", "chunk_first_tokens", "chunk_num_new", "tiles"],
)
def _prefill_kernel(
    q_source,
    cache,
    scales,
    out,
    q_norm,
    sinks,
    cos_sin,
    chunk_rows,
    chunk_starts,
    chunk_first_tokens,
    chunk_num_new,
    tiles,
    blocks,
    eps,
    max_blocks,
    num_blocks,
    score_scale,  # times log2(e), for exp2
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    LIFTED: tl.constexpr = LIFT if FP8 else 1.0
    scale_offset = num_blocks.to(tl.int64) * (KV_HEADS * BLOCK_SIZE)  # from a key's slot to its value's
    value_offset = scale_offset * HEAD_DIM
    kv_head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    chunk = tl.load(tiles + 2 * tl.program_id(0))
    first_new = tl.load(tiles + 2 * tl.program_id(0) + 1) * TOKENS  # of the tile, relative to the chunk
    start = tl.load(chunk_starts + chunk)
    num_new = tl.load(chunk_num_new + chunk)
    row = tl.load(chunk_rows + chunk).to(tl.int64)
    num_new = tl.where(start < 0, 0, num_new)  # a padding chunk
    row = tl.where(start < 0, 0, row)
    end_new = tl.minimum(first_new + TOKENS, num_new)
    first_position = start + first_new
    last_position = start + end_new - 1

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_PADDED)
    cols = tl.arange(0, BLOCK_N)
    used = rows < (end_new - first_new) * GROUP
    q_positions = first_position + rows // GROUP
    first_token = tl.load(chunk_first_tokens + chunk).to(tl.int64) + first_new
    inside = dims < HEAD_DIM
    q_heads = (
        rows // GROUP * (HEADS + 2 * KV_HEADS) + kv_head * GROUP + rows % GROUP
    )  # relative to the tile's first token
    q_base = q_source + first_token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    out_heads = rows // GROUP * HEADS + kv_head * GROUP + rows % GROUP
    out_rows = out + first_token * (HEADS * HEAD_DIM) + out_heads[:, None] * HEAD_DIM

    half = tl.arange(0, DIM_PADDED // 2)
    half_mask = used[:, None] & (half < HALF)[None, :]
    q1, q2 = load_halves(q_base, q_heads, half, half_mask, HEAD_DIM)
    angles = cos_sin + first_position.to(tl.int64) * HEAD_DIM + rows[:, None] // GROUP * HEAD_DIM + half[None, :]
    cos = tl.load(angles, mask=half_mask, other=0.0)
    sin = tl.load(angles + HALF, mask=half_mask, other=0.0)
    q1, q2 = norm_rotate(q1, q2, q_norm, eps, cos, sin, half, HEAD_DIM, NORM)
    halves = tl.join(q1.to(out.dtype.element_ty), q2.to(out.dtype.element_ty))
    q = tl.reshape(tl.permute(halves, (0, 2, 1)), (BLOCK_M, DIM_PADDED)).to(DOT_TYPE)
    if HEAD_DIM == DIM_PADDED:
        k_dims, k_inside = dims, inside
    else:  # in the order of the queries, where padding follows each half
        k_dims = dims // (DIM_PADDED // 2) * HALF + dims % (DIM_PADDED // 2)
        k_inside = dims % (DIM_PADDED // 2) < HALF

    # the keys that any row of the tile sees; values outside are uninitialized memory and must not be read
    low = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    high = tl.where(end_new > first_new, last_position + 1, 0)
    begin = low // BLOCK_N * BLOCK_N
    table = blocks + row * max_blocks
    last_block = tl.maximum(high - 1, 0) // BLOCK_SIZE

    largest = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that a row stays zero until it sees a key
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    block = block_numbers(table, begin, last_block, BLOCK_N, BLOCK_SIZE)
    for tile in tl.range(begin, high, BLOCK_N):
        positions = tile + cols
        seen = (positions >= low) & (positions < high)
        slots = slots_of(block, tile, kv_head, BLOCK_N, BLOCK_SIZE, KV_HEADS)
        kv_pointers = cache + slots[:, None] * HEAD_DIM
        k = tl.load(kv_pointers + k_dims[None, :], mask=k_inside[None, :], other=0.0).to(DOT_TYPE)
        v_pointers = kv_pointers + value_offset + dims[None, :]
        v = tl.load(v_pointers, mask=seen[:, None] & inside[None, :], other=0.0).to(DOT_TYPE)
        # block numbers are loaded one tile ahead of its keys and values
        block = block_numbers(table, tile + BLOCK_N, last_block, BLOCK_N, BLOCK_SIZE)
        if FP8:
            k_scale = tl.load(scales + slots).to(tl.float32) * score_scale
            v_scale = tl.load(scales + scale_offset + slots, mask=seen, other=0.0).to(tl.float32) * LIFTED

        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if FP8:
            scores = scores * k_scale[None, :]
        if (tile + BLOCK_N > first_position + 1) | ((WINDOW > 0) & (tile <= last_position - WINDOW)):
            visible = positions[None, :] <= q_positions[:, None]
            if WINDOW > 0:
                visible = visible & (positions[None, :] > (q_positions - WINDOW)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        # explicit fma: the compiler's choice of what to fuse could differ between tiles
        if FP8:
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            p = tl.exp2(scores - new_largest[:, None])
        else:
            new_largest = tl.maximum(largest, tl.max(scores, 1) * score_scale)
            p = tl.exp2(tl.fma(scores, score_scale, -new_largest[:, None]))
        shrink = tl.exp2(largest - new_largest)
        total = tl.fma(total, shrink, tl.sum(p, 1))
        if FP8:
            p = p * v_scale[None, :]
        acc = tl.dot(p.to(DOT_TYPE), v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new_largest

    if sinks is not None:
        sink = tl.load(sinks + kv_head * GROUP + rows % GROUP).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - largest)  # infinity, where it outweighs all keys, makes the result zero
    result = acc * (1.0 / (tl.where(used, total, 1.0) * LIFTED))[:, None]
    tl.store(out_rows + dims[None, :], result.to(out.dtype.element_ty), mask=used[:, None] & inside[None, :])


def paged_prefill(
    q_source: Tensor,  # [num_tokens, heads + 2 * kv_heads, head_dim]
    cache: Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim], with the chunks' own keys and values
    scales: Tensor | None,  # [2, num_blocks, kv_heads, block_size], of an fp8 cache
    *,
    q_norm: Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: Tensor,  # [max_position, head_dim] float32
    chunk_rows: Tensor,  # [num_chunks], rows of `blocks`
    chunk_starts: Tensor,  # [num_chunks], position of a chunk's first token; -1: padding
    chunk_first_tokens: Tensor,  # [num_chunks] index of that token in q_source
    chunk_num_new: Tensor,  # [num_chunks]
    tiles: Tensor,  # [num_tiles, 2], from `query_tiles` with block_m // group tokens per tile
    blocks: Tensor,  # [num_rows, max_blocks]
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    scale: float,  # of the scores before the softmax
    sinks: Tensor | None = None,  # [heads]: a logit of each that adds nothing
    out: Tensor,  # [num_tokens, heads * head_dim]; only the chunks' tokens are written
    config: PrefillConfig,
    pdl: bool = False,
) -> None:
    head_dim = cache.shape[4]
    assert q_source.is_contiguous() and cache.is_contiguous() and out.is_contiguous() and cos_sin.is_contiguous()
    assert out.dtype == q_source.dtype
    assert tiles.is_contiguous() and blocks.stride(1) == 1 and config.block_m >= num_heads // num_kv_heads
    assert (scales is not None) == (cache.dtype == torch.float8_e4m3fn)
    launch(
        _prefill_kernel,
        (tiles.shape[0], num_kv_heads),
        q_source,
        cache,
        cache if scales is None else scales,
        out,
        cos_sin if q_norm is None else q_norm,
        sinks,
        cos_sin,
        chunk_rows,
        chunk_starts,
        chunk_first_tokens,
        chunk_num_new,
        tiles,
        blocks,
        eps,
        blocks.stride(0),
        cache.shape[1],
        scale * math.log2(math.e),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=next_power_of_2(head_dim),
        BLOCK_SIZE=cache.shape[3],
        WINDOW=window or 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        DOT_TYPE=_DOT_TYPES[torch.float16 if scales is not None else cache.dtype],
        PRECISION="ieee" if cache.dtype == torch.float32 else "tf32",
        NORM=q_norm is not None,
        FP8=scales is not None,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        enable_fp_fusion=False,
        pdl=pdl,
    )


_DOT_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
