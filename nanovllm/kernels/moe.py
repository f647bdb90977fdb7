"""A mixture of experts in a fixed number of launches: no size on the host depends on what the router chose.

A pair is a token and one of its choices, numbered token * k + choice. Pairs are grouped by expert into blocks of
BLOCK_M rows, each of one expert alone; two matrix multiplications run block by block, and their result lands in the
order of the pairs, where each token's choices are added up. One to a few tokens skip the grouping: every pair reads its
expert itself, as fast as the memory delivers it.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels import launch


def experts_forward_reference(
    x: Tensor,  # [T, H]
    gate_up: Tensor,  # [E, 2 * I, H]
    down: Tensor,  # [E, H, I]
    weights: Tensor,  # [T, k]
    experts: Tensor,  # [T, k]
    *,
    residual: Tensor | None = None,  # [T, H]
) -> Tensor:
    """Token by token and expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if residual is None else residual.double()
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            if 0 <= expert < gate_up.shape[0]:
                gate, up = (gate_up[expert].double() @ row).chunk(2)
                out[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out.to(x.dtype)


class Tile(NamedTuple):
    """The part of a weight one step of a program multiplies, and how the program runs."""

    block_n: int  # rows of the weight: columns of the result
    block_k: int
    num_warps: int
    num_stages: int
    weight_left: bool = False  # the weight as the left factor: its rows fill a tensor core's 64 where tokens are few


class Tiles(NamedTuple):
    block_m: int  # pairs of a block
    gate_up: Tile
    down: Tile


# --- few tokens: a program a row of weights ---------------------------------------------------------------------------


@triton.jit
def _gate_up_row_kernel(
    x_ptr,  # [T, SIZE_K]
    weight_ptr,  # [NUM_EXPERTS, 2 * SIZE_N, SIZE_K]
    experts_ptr,  # [T * TOP_K]
    hidden_ptr,  # [T * TOP_K, SIZE_N]
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = (SIZE_N + BLOCK_N - 1) // BLOCK_N
    pair = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    rows = tl.minimum(n, SIZE_N - 1)[:, None] * SIZE_K
    gate_ptrs = weight_ptr + expert * (2 * SIZE_N * SIZE_K) + rows + k[None, :]
    up_ptrs = gate_ptrs + SIZE_N * SIZE_K
    # once for each row of weights: every thread loads the part it multiplies, and no barrier stands between the loads
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64) * SIZE_K + (n * 0)[:, None] + k[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in tl.range(0, SIZE_K, BLOCK_K, loop_unroll_factor=4):
        inside = (k < SIZE_K - begin)[None, :]
        x = tl.load(x_ptrs + begin, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(gate_ptrs + begin, mask=inside, other=0.0).to(tl.float32) * x
        up += tl.load(up_ptrs + begin, mask=inside, other=0.0).to(tl.float32) * x
    gate_sum = tl.sum(gate, 1)
    hidden = gate_sum * tl.sigmoid(gate_sum) * tl.sum(up, 1)
    tl.store(hidden_ptr + pair * SIZE_N + n, hidden.to(hidden_ptr.dtype.element_ty), mask=n < SIZE_N)


@triton.jit
def _down_row_kernel(
    hidden_ptr,  # [T * TOP_K, SIZE_K]
    weight_ptr,  # [NUM_EXPERTS, SIZE_N, SIZE_K]
    experts_ptr,  # [T * TOP_K]
    scales_ptr,  # [T * TOP_K], the routing weights
    residual_ptr,  # [T, SIZE_N]
    out_ptr,  # [T, SIZE_N]
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = (SIZE_N + BLOCK_N - 1) // BLOCK_N
    token = (tl.program_id(0) // tiles).to(tl.int64)
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = tl.minimum(n, SIZE_N - 1)[:, None] * SIZE_K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        end = tl.where((expert >= 0) & (expert < NUM_EXPERTS), SIZE_K, 0)
        scale = tl.load(scales_ptr + pair).to(tl.float32)
        hidden_ptrs = hidden_ptr + pair * SIZE_K + (n * 0)[:, None] + k[None, :]
        weight_ptrs = weight_ptr + expert * (SIZE_N * SIZE_K) + rows + k[None, :]
        for begin in tl.range(0, SIZE_K, BLOCK_K, loop_unroll_factor=4):
            inside = (k < end - begin)[None, :]
            hidden = tl.load(hidden_ptrs + begin, mask=inside, other=0.0).to(tl.float32) * scale
            acc += tl.load(weight_ptrs + begin, mask=inside, other=0.0).to(tl.float32) * hidden
    result = tl.sum(acc, 1)
    places = token * SIZE_N + n
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + places, mask=n < SIZE_N, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=n < SIZE_N)


# --- more tokens: pairs grouped by expert -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _group_kernel(
    experts_ptr,  # [num_pairs]
    pairs_ptr,  # [max_blocks * BLOCK_M]: the pairs of each block; num_pairs where a block is not full
    block_experts_ptr,  # [max_blocks]: the expert of each block; -1 after the last
    num_pairs,
    max_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # a power of two above NUM_EXPERTS
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program an expert: each counts all experts' pairs to know where its own begin, then places them in order."""
    mine = tl.program_id(0)
    offsets = tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        expert = tl.load(experts_ptr + begin + offsets, mask=begin + offsets < num_pairs, other=-1).to(tl.int32)
        chosen = (expert >= 0) & (expert < NUM_EXPERTS)
        counts += tl.histogram(tl.where(chosen, expert, NUM_EXPERTS), BINS)

    bins = tl.arange(0, BINS)
    blocks = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    count = tl.sum(tl.where(bins == mine, counts, 0))
    first_block = tl.sum(tl.where(bins < mine, blocks, 0))
    end_block = tl.sum(tl.where(bins <= mine, blocks, 0))
    num_blocks = tl.sum(blocks)

    place = first_block * BLOCK_M
    for begin in range(0, num_pairs, CHUNK):
        pair = begin + offsets
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_mine = expert == mine
        ordinal = tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + place + ordinal, pair, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32))
    padding = first_block * BLOCK_M + count + tl.arange(0, BLOCK_M)
    tl.store(pairs_ptr + padding, tl.zeros([BLOCK_M], tl.int32) + num_pairs, mask=padding < end_block * BLOCK_M)

    unused_begin = tl.where(mine == 0, num_blocks, max_blocks)  # the first program marks what no expert needs
    for begin in range(0, max_blocks, CHUNK):
        block = begin + offsets
        is_mine = (block >= first_block) & (block < end_block)
        is_unused = (block >= unused_begin) & (block < max_blocks)
        tl.store(block_experts_ptr + block, tl.where(is_mine, mine, -1), mask=is_mine | is_unused)


@triton.jit
def _rows(ptrs, valid, k, begin, SIZE_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The next [BLOCK_M, BLOCK_K] of gathered rows; zeros where there is none."""
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
    if WEIGHT_LEFT:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_ptr,  # [T, SIZE_K]
    weight_ptr,  # [E, 2 * SIZE_N, SIZE_K]
    pairs_ptr,  # [max_blocks * BLOCK_M]
    block_experts_ptr,  # [max_blocks]
    hidden_ptr,  # [num_pairs, SIZE_N]
    num_pairs,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    PDL: tl.constexpr,
):
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
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * SIZE_K + k[None, :]
    rows = tl.minimum(n, SIZE_N - 1)[:, None] * SIZE_K
    gate_ptrs = weight_ptr + expert * (2 * SIZE_N * SIZE_K) + rows + k[None, :]
    up_ptrs = gate_ptrs + SIZE_N * SIZE_K
    gate = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, SIZE_K, BLOCK_K):
        x = _rows(x_ptrs, valid, k, begin, SIZE_K, BLOCK_K)
        gate = _multiply(x, _weights(gate_ptrs, k, begin, SIZE_K, BLOCK_K), gate, WEIGHT_LEFT)
        up = _multiply(x, _weights(up_ptrs, k, begin, SIZE_K, BLOCK_K), up, WEIGHT_LEFT)
    hidden = (gate * tl.sigmoid(gate) * up).to(hidden_ptr.dtype.element_ty)
    if WEIGHT_LEFT:
        hidden = tl.trans(hidden)
    places = pair.to(tl.int64)[:, None] * SIZE_N + n[None, :]
    tl.store(hidden_ptr + places, hidden, mask=valid[:, None] & (n < SIZE_N)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    hidden_ptr,  # [num_pairs, SIZE_K]
    weight_ptr,  # [E, SIZE_N, SIZE_K]
    pairs_ptr,  # [max_blocks * BLOCK_M]
    block_experts_ptr,  # [max_blocks]
    scales_ptr,  # [num_pairs], the routing weights
    y_ptr,  # [num_pairs, SIZE_N]
    num_pairs,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    PDL: tl.constexpr,
):
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
    hidden_ptrs = hidden_ptr + pair.to(tl.int64)[:, None] * SIZE_K + k[None, :]
    rows = tl.minimum(n, SIZE_N - 1)[:, None] * SIZE_K
    weight_ptrs = weight_ptr + expert * (SIZE_N * SIZE_K) + rows + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, SIZE_K, BLOCK_K):
        hidden = _rows(hidden_ptrs, valid, k, begin, SIZE_K, BLOCK_K)
        acc = _multiply(hidden, _weights(weight_ptrs, k, begin, SIZE_K, BLOCK_K), acc, WEIGHT_LEFT)
    scale = tl.load(scales_ptr + pair, mask=valid, other=0.0).to(tl.float32)
    if WEIGHT_LEFT:
        y = tl.trans((acc * scale[None, :]).to(y_ptr.dtype.element_ty))
    else:
        y = (acc * scale[:, None]).to(y_ptr.dtype.element_ty)
    places = pair.to(tl.int64)[:, None] * SIZE_N + n[None, :]
    tl.store(y_ptr + places, y, mask=valid[:, None] & (n < SIZE_N)[None, :])


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
        # a row of y that no expert wrote holds anything
        end = tl.where((expert >= 0) & (expert < NUM_EXPERTS), SIZE, 0)
        total += tl.load(y_ptr + pair * SIZE + column, mask=column < end, other=0.0).to(tl.float32)
    places = token * SIZE + column
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside)


# --- launchers --------------------------------------------------------------------------------------------------------

ROW_TOKENS = 4  # up to so many tokens share so few experts that grouping them would not pay


def experts_forward(
    x: Tensor,  # [T, H]
    gate_up: Tensor,  # [E, 2 * I, H]: the rows of gate, then those of up
    down: Tensor,  # [E, H, I]
    weights: Tensor,  # [T, k], of x's type
    experts: Tensor,  # [T, k]; a choice outside 0..E-1 adds nothing
    *,
    out: Tensor | None = None,  # [T, H]
    residual: Tensor | None = None,  # [T, H]: the result is added to it, in place unless `out` is given
    invariant: bool = False,  # a token's bits do not depend on the others of the batch
    pdl: bool = False,
) -> Tensor:
    """Sum over a token's choices of weight * down(silu(gate(x)) * up(x)), each by the chosen expert."""
    if out is None:
        out = torch.empty_like(x) if residual is None else residual
    if x.shape[0] == 0:
        return out
    assert all(t.is_contiguous() for t in (x, gate_up, down, weights, experts, out))
    assert residual is None or residual.is_contiguous()
    if x.shape[0] <= ROW_TOKENS and not invariant:
        return rows_forward(x, gate_up, down, weights, experts, out, residual, *row_tiles(x.dtype), pdl=pdl)
    tiles = choose_tiles(experts.numel() / gate_up.shape[0], x.dtype, invariant=invariant)
    return grouped_forward(x, gate_up, down, weights, experts, out, residual, tiles, pdl=pdl)


def rows_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    residual: Tensor | None,
    gate_up_tile: Tile,
    down_tile: Tile,
    *,
    pdl: bool,
) -> Tensor:
    (num_tokens, hidden_size), (num_experts, _, size) = x.shape, down.shape
    top_k = experts.shape[1]
    hidden = torch.empty(num_tokens * top_k, size, dtype=x.dtype, device=x.device)
    options: dict[str, Any] = {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "PDL": pdl, "pdl": pdl}
    tile = gate_up_tile
    launch(
        _gate_up_row_kernel,
        (num_tokens * top_k * triton.cdiv(size, tile.block_n),),
        x,
        gate_up,
        experts,
        hidden,
        SIZE_N=size,
        SIZE_K=hidden_size,
        **_launch(tile),
        **options,
    )
    tile = down_tile
    launch(
        _down_row_kernel,
        (num_tokens * triton.cdiv(hidden_size, tile.block_n),),
        hidden,
        down,
        experts,
        weights,
        residual,
        out,
        SIZE_N=hidden_size,
        SIZE_K=size,
        HAS_RESIDUAL=residual is not None,
        **_launch(tile),
        **options,
    )
    return out


def grouped_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    residual: Tensor | None,
    tiles: Tiles,
    *,
    pdl: bool,
) -> Tensor:
    (num_tokens, hidden_size), (num_experts, _, size) = x.shape, down.shape
    top_k, num_pairs = experts.shape[1], experts.numel()
    pairs, block_experts = group(experts, num_experts, block_m=tiles.block_m, pdl=pdl)
    hidden = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    y = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)
    options: dict[str, Any] = {"PDL": pdl, "pdl": pdl}
    tile = tiles.gate_up
    launch(
        _gate_up_kernel,
        (block_experts.numel() * triton.cdiv(size, tile.block_n),),
        x,
        gate_up,
        pairs,
        block_experts,
        hidden,
        num_pairs,
        SIZE_N=size,
        SIZE_K=hidden_size,
        TOP_K=top_k,
        BLOCK_M=tiles.block_m,
        WEIGHT_LEFT=tile.weight_left,
        **_launch(tile),
        **options,
    )
    tile = tiles.down
    launch(
        _down_kernel,
        (block_experts.numel() * triton.cdiv(hidden_size, tile.block_n),),
        hidden,
        down,
        pairs,
        block_experts,
        weights,
        y,
        num_pairs,
        SIZE_N=hidden_size,
        SIZE_K=size,
        BLOCK_M=tiles.block_m,
        WEIGHT_LEFT=tile.weight_left,
        **_launch(tile),
        **options,
    )
    block = min(1024, triton.next_power_of_2(hidden_size))
    launch(
        _sum_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        y,
        experts,
        residual,
        out,
        SIZE=hidden_size,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4,
        **options,
    )
    return out


def group(experts: Tensor, num_experts: int, *, block_m: int, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Blocks of pairs of one expert each: the pairs [blocks * block_m], padded with their number; the experts [blocks],
    -1 after the last. An expert's pairs keep their order."""
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
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=block_m,
        CHUNK=1024,
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
    return pairs, block_experts


def _launch(tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


# --- which tiles ------------------------------------------------------------------------------------------------------

DECODE_TILES = Tiles(16, gate_up=Tile(32, 128, 4, 4), down=Tile(64, 128, 4, 4))
MEDIUM_TILES = Tiles(32, gate_up=Tile(64, 64, 4, 4, weight_left=True), down=Tile(64, 128, 4, 4, weight_left=True))
LARGE_TILES = Tiles(64, gate_up=Tile(64, 64, 4, 4), down=Tile(128, 64, 4, 4))
PREFILL_TILES = Tiles(128, gate_up=Tile(128, 64, 8, 3), down=Tile(128, 64, 8, 4))
# a float32 product is no tensor core's work: small tiles, to keep it in the registers
FLOAT32_DECODE_TILES = Tiles(16, gate_up=Tile(32, 32, 4, 3), down=Tile(32, 32, 4, 3))
FLOAT32_PREFILL_TILES = Tiles(64, gate_up=Tile(32, 32, 4, 3), down=Tile(64, 32, 4, 3))


def choose_tiles(pairs_per_expert: float, dtype: torch.dtype, *, invariant: bool) -> Tiles:
    """`invariant`: the tiles that lose least where there are many tokens, whatever their number."""
    if dtype == torch.float32:
        return FLOAT32_PREFILL_TILES if invariant or pairs_per_expert > 32 else FLOAT32_DECODE_TILES
    if invariant:
        return LARGE_TILES
    if pairs_per_expert <= 8:
        return DECODE_TILES
    if pairs_per_expert <= 24:
        return MEDIUM_TILES
    return LARGE_TILES if pairs_per_expert <= 96 else PREFILL_TILES


def row_tiles(dtype: torch.dtype) -> tuple[Tile, Tile]:
    block_k = 256 if dtype == torch.float32 else 512
    return Tile(4, block_k, 4, 1), Tile(4, 256, 4, 1)
