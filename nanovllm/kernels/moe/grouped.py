"""The experts of many tokens: (token, choice) pairs are grouped by expert, then multiplied in blocks.

A block holds up to BLOCK_M pairs of one expert. Results are written in the order of the pairs, and a last kernel adds
up each token's choices.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2
from nanovllm.kernels.moe.activation import gated
from nanovllm.kernels.moe.tiles import Tile, Tiles
from nanovllm.kernels.moe.weights import ExpertWeights


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _group_kernel(
    experts_ptr,  # [num_pairs]
    pairs_ptr,  # [max_blocks * BLOCK_M], written: the pairs of each block, padded with num_pairs
    block_experts_ptr,  # [max_blocks], written: the expert of each block, -1 for unused blocks
    num_pairs,
    max_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # a power of two above NUM_EXPERTS
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    LARGEST_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert: it counts the pairs of all experts to find where its own begin, then writes these."""
    mine = tl.program_id(0)
    offsets = tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        expert = tl.load(experts_ptr + begin + offsets, mask=begin + offsets < num_pairs, other=-1).to(tl.int32)
        chosen = (expert >= 0) & (expert < NUM_EXPERTS)
        counts += tl.histogram(tl.where(chosen, expert, NUM_EXPERTS), BINS)

    bins = tl.arange(0, BINS)
    blocks = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    count = tl.sum(tl.where(bins == mine, counts, 0))
    before = bins < mine
    if LARGEST_FIRST:
        before = (counts > count) | ((counts == count) & before)
    first_block = tl.sum(tl.where(before, blocks, 0))
    end_block = first_block + (count + BLOCK_M - 1) // BLOCK_M
    num_blocks = tl.sum(blocks)

    next_slot = first_block * BLOCK_M
    for begin in range(0, num_pairs, CHUNK):
        pair = begin + offsets
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_mine = expert == mine
        ordinal = tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + next_slot + ordinal, pair, mask=is_mine)
        next_slot += tl.sum(is_mine.to(tl.int32))
    padding = first_block * BLOCK_M + count + tl.arange(0, BLOCK_M)
    tl.store(pairs_ptr + padding, tl.zeros([BLOCK_M], tl.int32) + num_pairs, mask=padding < end_block * BLOCK_M)

    unused_begin = tl.where(mine == 0, num_blocks, max_blocks)  # the first program marks the unused blocks
    for begin in range(0, max_blocks, CHUNK):
        block = begin + offsets
        is_mine = (block >= first_block) & (block < end_block)
        is_unused = (block >= unused_begin) & (block < max_blocks)
        tl.store(block_experts_ptr + block, tl.where(is_mine, mine, -1), mask=is_mine | is_unused)


@triton.jit
def _rows(ptrs, valid, k, begin, SIZE_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the next [BLOCK_M, BLOCK_K] of the gathered rows; zeros for padding and past SIZE_K."""
    if SIZE_K % BLOCK_K == 0:
        rows = tl.load(ptrs + begin, mask=valid[:, None], other=0.0)
    else:
        rows = tl.load(ptrs + begin, mask=valid[:, None] & (k < SIZE_K - begin)[None, :], other=0.0)
    return rows


@triton.jit
def _weights(ptrs, k, begin, SIZE_K: tl.constexpr, BLOCK_K: tl.constexpr):  # [BLOCK_N, BLOCK_K]
    if SIZE_K % BLOCK_K == 0:
        weights = tl.load(ptrs + begin)
    else:
        weights = tl.load(ptrs + begin, mask=(k < SIZE_K - begin)[None, :], other=0.0)
    return weights


@triton.jit
def _multiply(rows, weights, acc, WEIGHT_LEFT: tl.constexpr):
    if weights.dtype == tl.int8:
        weights = weights.to(rows.dtype)
    if WEIGHT_LEFT:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    return acc


@triton.jit
def _biased(acc, ptrs, WEIGHT_LEFT: tl.constexpr):
    """Add each weight row's bias to the row's results."""
    bias = tl.load(ptrs).to(tl.float32)
    return acc + (bias[:, None] if WEIGHT_LEFT else bias[None, :])


@triton.jit
def _scaled(acc, ptrs, WEIGHT_LEFT: tl.constexpr):
    """Multiply each weight row's results by the row's scale."""
    scale = tl.load(ptrs)
    return acc * (scale[:, None] if WEIGHT_LEFT else scale[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _experts_kernel(
    x_ptr,  # [num_pairs / SHARED, SIZE_K]
    weight_ptr,  # [E, SIZE_N, SIZE_K]; GATED: [E, 2 * SIZE_N, SIZE_K], the gate rows, then the up rows
    scale_ptr,  # [E, SIZE_N]; GATED: [E, 2 * SIZE_N]; or None
    bias_ptr,  # as scale_ptr
    pairs_ptr,  # [max_blocks * BLOCK_M]
    block_experts_ptr,  # [max_blocks]
    routing_ptr,  # [num_pairs], the routing weights; not used if GATED
    out_ptr,  # [num_pairs, SIZE_N]
    num_pairs,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    SHARED: tl.constexpr,  # number of consecutive pairs that use the same row of x
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = activation(gate(x), up(x)), or routing weight * down(x), with the weights of each pair's expert."""
    tiles: tl.constexpr = (SIZE_N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = pair < num_pairs
    x_ptrs = x_ptr + (pair // SHARED).to(tl.int64)[:, None] * SIZE_K + k[None, :]
    halves: tl.constexpr = 2 if GATED else 1
    rows = tl.minimum(n, SIZE_N - 1)[:, None] * SIZE_K
    weight_ptrs = weight_ptr + expert * (halves * SIZE_N * SIZE_K) + rows + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    for begin in range(0, SIZE_K, BLOCK_K):
        x = _rows(x_ptrs, valid, k, begin, SIZE_K, BLOCK_K)
        acc = _multiply(x, _weights(weight_ptrs, k, begin, SIZE_K, BLOCK_K), acc, WEIGHT_LEFT)
        if GATED:
            up = _multiply(x, _weights(weight_ptrs + SIZE_N * SIZE_K, k, begin, SIZE_K, BLOCK_K), up, WEIGHT_LEFT)
    if scale_ptr is not None:
        scale_ptrs = scale_ptr + expert * (halves * SIZE_N) + tl.minimum(n, SIZE_N - 1)
        acc = _scaled(acc, scale_ptrs, WEIGHT_LEFT)
        if GATED:
            up = _scaled(up, scale_ptrs + SIZE_N, WEIGHT_LEFT)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * (halves * SIZE_N) + tl.minimum(n, SIZE_N - 1)
        acc = _biased(acc, bias_ptrs, WEIGHT_LEFT)
        if GATED:
            up = _biased(up, bias_ptrs + SIZE_N, WEIGHT_LEFT)
    if GATED:
        acc = gated(acc, up, ALPHA, LIMIT, GELU)
    else:
        routing = tl.load(routing_ptr + pair, mask=valid, other=0.0).to(tl.float32)
        acc = acc * (routing[None, :] if WEIGHT_LEFT else routing[:, None])
    out = acc.to(out_ptr.dtype.element_ty)
    if WEIGHT_LEFT:
        out = tl.trans(out)
    out_offsets = pair.to(tl.int64)[:, None] * SIZE_N + n[None, :]
    tl.store(out_ptr + out_offsets, out, mask=valid[:, None] & (n < SIZE_N)[None, :])


@triton.jit
def _sum_kernel(
    y_ptr,  # [T * TOP_K, SIZE]
    experts_ptr,  # [T * TOP_K]
    residual_ptr,  # [T, SIZE]
    out_ptr,  # [T, SIZE]
    SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = residual + the sum of each token's TOP_K rows of y: one program per token and BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(experts_ptr + pair)
        # rows of y whose choice is no expert were never written
        end = tl.where((expert >= 0) & (expert < NUM_EXPERTS), SIZE, 0)
        total += tl.load(y_ptr + pair * SIZE + column, mask=column < end, other=0.0).to(tl.float32)
    out_offsets = token * SIZE + column
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + out_offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_offsets, total.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_forward(
    x: Tensor,
    layer: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    residual: Tensor | None,
    tiles: Tiles,
    *,
    pdl: bool,
) -> Tensor:
    """Four launches: group, gate_up, down, sum. Arguments as for `experts_forward`; returns `out`."""
    num_experts, hidden_size, size = layer.down.shape
    top_k, num_pairs = experts.shape[1], experts.numel()
    pairs, block_experts = group(experts, num_experts, block_m=tiles.block_m, pdl=pdl)
    hidden = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    y = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)
    options: dict[str, Any] = {"PDL": pdl, "pdl": pdl}

    def multiply(
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        tile: Tile,
        *,
        shared: int,
        is_gated: bool,
    ) -> None:
        launch(
            _experts_kernel,
            (block_experts.numel() * cdiv(out.shape[1], tile.block_n),),
            x,
            weight,
            scale,
            bias,
            pairs,
            block_experts,
            weights,
            out,
            num_pairs,
            SIZE_N=out.shape[1],
            SIZE_K=x.shape[1],
            SHARED=shared,
            GATED=is_gated,
            ALPHA=layer.alpha,
            LIMIT=layer.limit,
            GELU=layer.gelu,
            BLOCK_M=tiles.block_m,
            WEIGHT_LEFT=tile.weight_left,
            **tile.options,
            **options,
        )

    first, second = (layer.gate_up_scale, layer.gate_up_bias), (layer.down_scale, layer.down_bias)
    multiply(x, layer.gate_up, *first, hidden, tiles.gate_up, shared=top_k, is_gated=True)
    multiply(hidden, layer.down, *second, y, tiles.down, shared=1, is_gated=False)
    return sum_choices(y, experts, num_experts, out, residual, pdl=pdl)


def sum_choices(
    y: Tensor,  # [T * k, H]
    experts: Tensor,  # [T, k]
    num_experts: int,
    out: Tensor,  # [T, H]
    residual: Tensor | None,  # [T, H]
    *,
    pdl: bool,
) -> Tensor:
    """out = residual + the sum of each token's rows of y. Returns `out`."""
    num_tokens, hidden_size = out.shape
    block = min(1024, next_power_of_2(hidden_size))
    launch(
        _sum_kernel,
        (num_tokens, cdiv(hidden_size, block)),
        y,
        experts,
        residual,
        out,
        SIZE=hidden_size,
        NUM_EXPERTS=num_experts,
        TOP_K=experts.shape[1],
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
    return out


def group(
    experts: Tensor, num_experts: int, *, block_m: int, largest_first: bool = False, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Group pairs into blocks of one expert each.

    Returns the pairs [max_blocks * block_m], padded with num_pairs, and the expert of each block [max_blocks], -1 for
    unused blocks. An expert's pairs keep their order. `largest_first`: the experts with the most pairs come first.
    """
    num_pairs = experts.numel()
    max_blocks = min(num_pairs, num_experts) + num_pairs // block_m
    pairs = torch.empty(max_blocks * block_m, dtype=torch.int32, device=experts.device)
    block_experts = torch.empty(max_blocks, dtype=torch.int32, device=experts.device)
    launch(
        _group_kernel,
        (num_experts,),
        experts,
        pairs,
        block_experts,
        num_pairs,
        max_blocks,
        NUM_EXPERTS=num_experts,
        BINS=next_power_of_2(num_experts + 1),
        BLOCK_M=block_m,
        CHUNK=1024,
        LARGEST_FIRST=largest_first,
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
    return pairs, block_experts
