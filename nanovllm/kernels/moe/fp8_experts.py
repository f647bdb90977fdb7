"""Experts with fp8 weights and inputs rounded to fp8 (W8A8) on Hopper: a kernel with warps of its own for loads.

As linear/fp8_some_rows.py it computes W x^T with wgmma: a consumer warpgroup multiplies 64 rows of an expert's weight
with the inputs of a block of pairs of a token and this expert. A producer warp keeps a ring of shared-memory stages
full with TMA, also across tiles and experts. TMA reads adjacent rows only: another warp copies the tokens' inputs of
gate_up. What gate_up writes is in the order of blocks, and `down` writes each pair's result to the pair's row.

The programs of `down` load the weights of their first stages as soon as a multiprocessor has room for them, while
others still run gate_up.

Written in Gluon, which has no interpreter: tests without a GPU only compile the kernel.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels.launch import launch
from nanovllm.kernels.linear.fp8_inputs import RoundedInputs, round_inputs
from nanovllm.kernels.linear.fp8_some_rows import W_CODES, X_CODES, _row_halves
from nanovllm.kernels.linear.many_rows import _async_load, _barrier
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.tiled import num_sms
from nanovllm.kernels.moe.activation import gated
from nanovllm.kernels.moe.forms import Fp8Form, Fp8Sizes
from nanovllm.kernels.moe.fp8_slots import Blocks, round_slots
from nanovllm.kernels.moe.grouped import group, sum_choices
from nanovllm.kernels.moe.tiles import SINGLE_TOKENS, Fp8ExpertTile, fp8_expert_tiles
from nanovllm.kernels.moe.weights import PackedExperts

ROWS = gl.constexpr(64)  # of the weight per consumer warpgroup
COLUMNS = gl.constexpr(128)  # of a stage

# names of later versions of Triton, or of 3.6
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _expert_of(block_experts, index, num_tiles, num_blocks, TILES: gl.constexpr, NUM_EXPERTS: gl.constexpr):
    """The expert of a tile, -1 if it has none or is past the last."""
    expert = gl.load(block_experts + gl.minimum(index // TILES, num_blocks - 1))
    return gl.where((index < num_tiles) & (expert < NUM_EXPERTS), expert, -1)


@gluon.jit
def _next(block_experts, index, sizes, FORM: gl.constexpr):
    """The next tile of this program that has an expert, and this expert; -1 after the last one.

    Unused blocks of `group` are the last. A pair that is a block by itself may have no expert in between.
    """
    TILES: gl.constexpr = FORM.TILES
    NUM_EXPERTS: gl.constexpr = FORM.NUM_EXPERTS
    SINGLE: gl.constexpr = FORM.SINGLE
    index += gl.num_programs(0)
    expert = _expert_of(block_experts, index, sizes.num_tiles, sizes.num_blocks, TILES, NUM_EXPERTS)
    if SINGLE:
        while (expert < 0) & (index < sizes.num_tiles):
            index += gl.num_programs(0)
            expert = _expert_of(block_experts, index, sizes.num_tiles, sizes.num_blocks, TILES, NUM_EXPERTS)
    return index, expert


@gluon.jit
def _load_weights(w, ws, full, slot, expert, tile, step, FORM: gl.constexpr, X_BYTES: gl.constexpr):
    """The weights of a stage. Its inputs are loaded, too, before it is full."""
    N: gl.constexpr = FORM.N
    GATED: gl.constexpr = FORM.GATED
    SLABS: gl.constexpr = ws.shape[0] // full.shape[0]
    mbarrier.expect(full.index(slot), X_BYTES + SLABS * ROWS * COLUMNS)
    for s in gl.static_range(SLABS):
        # gated, in units of eight rows, otherwise of sixteen
        first = expert * (2 * N // 8 if GATED else N // 16) + (tile * SLABS + s) * 4
        _async_load(w, [first, 0, 0, step * COLUMNS], full.index(slot), ws.index(slot * SLABS + s))


@gluon.jit
def _produce(rings, x, w, block_experts, sizes, FORM: gl.constexpr, PDL: gl.constexpr):
    """The producer warp: weights of every tile of this program, and inputs that are adjacent rows."""
    xs, ws, full, empty = rings
    K: gl.constexpr = FORM.K
    GATED: gl.constexpr = FORM.GATED
    TILES: gl.constexpr = FORM.TILES
    TOP_K: gl.constexpr = FORM.TOP_K
    SINGLE: gl.constexpr = FORM.SINGLE
    GATHER: gl.constexpr = GATED and not SINGLE
    STEPS: gl.constexpr = K // COLUMNS
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = xs.shape[1]
    X_BYTES: gl.constexpr = 0 if GATHER else BLOCK_M * COLUMNS
    EARLY: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    index, expert = _next(block_experts, gl.program_id(0) - gl.num_programs(0), sizes, FORM)
    if expert >= 0:
        for step in gl.static_range(EARLY):
            _load_weights(w, ws, full, step, expert, index % TILES, step, FORM, X_BYTES)
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
    it = 0
    while expert >= 0:
        next_index, following = _next(block_experts, index, sizes, FORM)
        block, tile = index // TILES, index % TILES
        row = (block // TOP_K if GATED else block) if SINGLE else block * BLOCK_M
        for step in range(STEPS):
            slot = it % STAGES
            if it >= EARLY:
                # returns at once for a new barrier and parity 1
                mbarrier.wait(empty.index(slot), it // STAGES & 1 ^ 1)
                _load_weights(w, ws, full, slot, expert, tile, step, FORM, X_BYTES)
            if not GATHER:
                _async_load(x, [row, step * COLUMNS], full.index(slot), xs.index(slot))
            it += 1
        index, expert = next_index, following


@gluon.jit
def _gather(rings, x, pairs, block_experts, sizes, FORM: gl.constexpr):
    """A warp that copies the inputs of the tokens of each block of gate_up, whose rows are not adjacent."""
    xs, _, full, empty = rings
    K: gl.constexpr = FORM.K
    TILES: gl.constexpr = FORM.TILES
    TOP_K: gl.constexpr = FORM.TOP_K
    BLOCK_M: gl.constexpr = xs.shape[1]
    STAGES: gl.constexpr = full.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
    if FORM.GATED and not FORM.SINGLE:
        row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
        column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), 0)
        index, expert = _next(block_experts, gl.program_id(0) - gl.num_programs(0), sizes, FORM)
        it = 0
        while expert >= 0:
            pair = gl.load(pairs + index // TILES * BLOCK_M + row)
            index, expert = _next(block_experts, index, sizes, FORM)
            # past the last pair of an expert, any row
            offsets = gl.expand_dims(gl.minimum(pair, sizes.num_pairs - 1) // TOP_K, 1) * K + column
            for step in range(K // COLUMNS):
                slot = it % STAGES
                mbarrier.wait(empty.index(slot), it // STAGES & 1 ^ 1)
                _copy(xs.index(slot), (x + step * COLUMNS) + offsets)
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)  # once they have arrived
                it += 1


@gluon.jit
def _multiply(rings, scales, groups, sizes, FORM: gl.constexpr, PDL: gl.constexpr, G: gl.constexpr):
    """Consumer warpgroup G: multiply and store its rows of the weight in every tile of this program."""
    xs, ws, full, empty = rings
    x_scale, w_scale = scales
    pairs, block_experts, routing, out = groups
    num_pairs = sizes.num_pairs
    N: gl.constexpr = FORM.N
    K: gl.constexpr = FORM.K
    GATED: gl.constexpr = FORM.GATED
    TILES: gl.constexpr = FORM.TILES
    BLOCKED: gl.constexpr = FORM.BLOCKED
    SCALE_ROWS: gl.constexpr = FORM.SCALE_ROWS
    ALPHA: gl.constexpr = FORM.ALPHA
    LIMIT: gl.constexpr = FORM.LIMIT
    GELU: gl.constexpr = FORM.GELU
    SINGLE: gl.constexpr = FORM.SINGLE
    STEPS: gl.constexpr = K // COLUMNS
    STAGES: gl.constexpr = full.shape[0]
    SLABS: gl.constexpr = ws.shape[0] // STAGES
    BLOCK_M: gl.constexpr = xs.shape[1]
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    ALL: gl.constexpr = 2 * N if GATED else N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    j = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    i = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    index, expert = _next(block_experts, gl.program_id(0) - gl.num_programs(0), sizes, FORM)
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
    slot, phase = 0, 0
    while expert >= 0:
        block = index // TILES
        first_n = (index % TILES * SLABS + G) * WIDTH
        rows = first_n + j // 16 * 8 + j % 8 + j // 8 % 2 * N if GATED else first_n + j
        w_scales = w_scale + (expert * (ALL // SCALE_ROWS) + rows // SCALE_ROWS) * (STEPS if BLOCKED else 1)
        index, expert = _next(block_experts, index, sizes, FORM)
        x_scales = x_scale + _rows_of_x(pairs, block, i, num_pairs, FORM)
        if not BLOCKED:
            s_w, s_x = gl.load(w_scales), gl.load(x_scales)
        if not GATED:
            pair = _pairs_of(pairs, block, i, num_pairs)
            weight = gl.load(routing + pair, mask=pair < num_pairs, other=0.0).to(gl.float32)
        place = _places(pairs, block, num_pairs, BLOCK_M, FORM)
        y = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
        for step in range(STEPS):
            if BLOCKED:
                s_w, s_x = gl.load(w_scales + step), gl.load(x_scales + step * sizes.x_scale_stride)
            mbarrier.wait(full.index(slot), phase)
            if GATED and not SINGLE:
                fence_async_shared()  # inputs were not copied by TMA
            w = ws.index(slot * SLABS + G).reshape([ROWS, COLUMNS])
            sums = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
            sums = warpgroup_mma(w, xs.index(slot).permute([1, 0]), sums, use_acc=False, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            _barrier()  # all four warps have waited
            mbarrier.arrive(empty.index(slot), count=1)
            last = slot == STAGES - 1
            slot, phase = gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
            if BLOCKED:
                y += sums * s_w[:, None] * s_x[None, :]
            else:
                y += sums
        if not BLOCKED:
            y *= s_w[:, None] * s_x[None, :]
        if GATED:
            gate, up = _row_halves(y)
            y = gl.reshape(gated(gate, up, ALPHA, LIMIT, GELU), [WIDTH, BLOCK_M])
        else:
            y *= weight[None, :]
        _store(y.to(out.dtype.element_ty), place, out, first_n, N)


@gluon.jit
def _pairs_of(pairs, block, i, num_pairs):
    """The pairs of a block, num_pairs where it has none. Without `pairs` a block has one."""
    return gl.where(i == 0, block, num_pairs) if pairs is None else gl.load(pairs + block * i.shape[0] + i)


@gluon.jit
def _rows_of_x(pairs, block, i, num_pairs, FORM: gl.constexpr):
    """The rows of x that a block reads: for gate_up the tokens, for `down` the slots."""
    if FORM.GATED:
        rows = gl.minimum(_pairs_of(pairs, block, i, num_pairs), num_pairs - 1) // FORM.TOP_K
    elif FORM.SINGLE:
        rows = block + i * 0
    else:
        rows = block * i.shape[0] + i
    return rows


@gluon.constexpr_function
def _store_layout(width: int):
    return gl.BlockedLayout([8, 1], [width // 8, 256 // width], [1, 4], [0, 1])


@gluon.jit
def _places(pairs, block, num_pairs, BLOCK_M: gl.constexpr, FORM: gl.constexpr):
    """The rows to which a block's results are written, -1 for those that belong to no pair."""
    GATED: gl.constexpr = FORM.GATED
    TOP_K: gl.constexpr = FORM.TOP_K
    i = gl.arange(0, BLOCK_M, gl.SliceLayout(0, _store_layout(ROWS // 2 if GATED else ROWS)))
    pair = _pairs_of(pairs, block, i, num_pairs)
    if not GATED:
        place = pair
        if FORM.BY_CHOICE:  # all tokens' first choices, then their second ones, and so on
            place = pair % TOP_K * (num_pairs // TOP_K) + pair // TOP_K
    elif FORM.SINGLE:
        place = pair
    else:
        place = block * BLOCK_M + i
    return gl.where(pair < num_pairs, place, -1)


@gluon.jit
def _store(y, place, out, first_n, N: gl.constexpr):
    LAYOUT: gl.constexpr = _store_layout(y.shape[0])
    n = gl.expand_dims(first_n + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    place = gl.expand_dims(place, 0)
    gl.store(out + place.to(gl.int64) * N + n, gl.convert_layout(y, LAYOUT), mask=place >= 0)


@gluon.jit(do_not_specialize=["num_pairs", "num_tiles", "num_blocks", "x_scale_stride"])
def _fp8_experts_kernel(
    x,  # gate_up: [T, K]; down: [slots, K]
    w,
    x_scale,  # [groups, rows of x]
    w_scale,  # [E, rows / SCALE_ROWS, groups]; rows: N, or gated 2 * N
    block_experts,  # [num_blocks]
    pairs,  # [num_blocks * BLOCK_M], or None: every pair is a block by itself
    routing,  # [num_pairs], the routing weights; not used if gated
    out,  # gate_up: [slots, N]; down: [num_pairs, N]
    num_pairs,
    num_tiles,
    num_blocks,
    x_scale_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    BLOCKED: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    BY_CHOICE: gl.constexpr,  # rows of down's `out` are in the order of choices, then tokens
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    GELU: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    CONSUMER: gl.constexpr,  # registers of threads
    PRODUCER: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        if GATED:  # a kernel before this one writes the blocks; those after it read them before they wait
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    TILES: gl.constexpr = N // (SLABS * WIDTH)
    SINGLE: gl.constexpr = pairs is None
    GATHER: gl.constexpr = GATED and not SINGLE
    xs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, COLUMNS], X_CODES)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES * SLABS, ROWS // 16, 2, 8, COLUMNS], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=33 if GATHER else 1)  # TMA and the lanes of the warp that gathers
        mbarrier.init(empty.index(s), count=SLABS)
    fence_async_shared()
    _barrier()
    rings = xs, ws, full, empty
    scales = x_scale, w_scale
    groups = pairs, block_experts, routing, out
    sizes = Fp8Sizes(num_pairs, num_tiles, num_blocks, x_scale_stride)
    FORM: gl.constexpr = Fp8Form(
        N, K, GATED, TILES, BLOCKED, SCALE_ROWS, TOP_K, ALPHA, LIMIT, GELU, NUM_EXPERTS, SINGLE, BY_CHOICE
    )  # fmt: skip
    if SLABS == 1:
        gl.warp_specialize(
            [
                (_multiply, (rings, scales, groups, sizes, FORM, PDL, 0)),
                (_produce, (rings, x, w, block_experts, sizes, FORM, PDL)),
                (_gather, (rings, x, pairs, block_experts, sizes, FORM)),
            ],
            [1, 1],
            [PRODUCER, PRODUCER],
        )
    elif SLABS == 2:
        gl.warp_specialize(
            [
                (_multiply, (rings, scales, groups, sizes, FORM, PDL, 0)),
                (_multiply, (rings, scales, groups, sizes, FORM, PDL, 1)),
                (_produce, (rings, x, w, block_experts, sizes, FORM, PDL)),
                (_gather, (rings, x, pairs, block_experts, sizes, FORM)),
            ],
            [4, 1, 1],
            [CONSUMER, PRODUCER, PRODUCER],
        )
    else:
        gl.static_assert(SLABS == 4)
        gl.warp_specialize(
            [
                (_multiply, (rings, scales, groups, sizes, FORM, PDL, 0)),
                (_multiply, (rings, scales, groups, sizes, FORM, PDL, 1)),
                (_multiply, (rings, scales, groups, sizes, FORM, PDL, 2)),
                (_multiply, (rings, scales, groups, sizes, FORM, PDL, 3)),
                (_produce, (rings, x, w, block_experts, sizes, FORM, PDL)),
                (_gather, (rings, x, pairs, block_experts, sizes, FORM)),
            ],
            [4, 4, 4, 1, 1],
            [CONSUMER, CONSUMER, CONSUMER, PRODUCER, PRODUCER],
        )


@dataclass(frozen=True)
class _Product:
    """What is the same for both products of a call."""

    layer: PackedExperts
    blocks: Blocks
    routing: Tensor  # [T, k]
    pdl: bool

    def __call__(
        self,
        rounded: RoundedInputs,
        weight: PackedWords,
        out: Tensor,  # gate_up: [slots, N]; down: [T * k, N]
        tile: Fp8ExpertTile,
        *,
        is_gated: bool,
        by_choice: bool = False,
    ) -> None:
        (codes, x_scale), (num_experts, rows, k), n = rounded, weight.shape, out.shape[1]
        w, box = weight.words.view(torch.float8_e4m3fn), [ROWS.value // 16, 2, 8, COLUMNS.value]
        # 8 rows of gate and 8 of up in turn, so that a thread has a gate and its up; or 16 rows that follow each other
        shape = [num_experts * rows // (8 if is_gated else 16), 2, 8, k]
        strides = [8 * k if is_gated else 16 * k, n * k if is_gated else 8 * k, k, 1]
        registers, consumer, loading = tile.registers
        num_blocks, width = len(self.blocks.experts), ROWS.value // 2 if is_gated else ROWS.value
        assert n % (tile.slabs * width) == 0 == k % COLUMNS.value
        num_tiles = num_blocks * (n // (tile.slabs * width))
        gathers = is_gated and self.blocks.pairs is not None
        launch(
            _fp8_experts_kernel,
            (min(num_sms() * tile.programs, num_tiles),),
            codes if gathers else TensorDescriptor(codes, list(codes.shape), [k, 1], [tile.block_m, 128], X_CODES),
            TensorDescriptor(w, shape, strides, box, W_CODES),
            x_scale,
            weight.scale,
            *self.blocks,
            self.routing,
            out,
            self.routing.numel(),
            num_tiles,
            num_blocks,
            x_scale.stride(0),
            N=n,
            K=k,
            NUM_EXPERTS=num_experts,
            TOP_K=self.routing.shape[1],
            GATED=is_gated,
            BLOCKED=weight.scale.shape[-1] > 1,
            SCALE_ROWS=weight.scale_rows,
            BY_CHOICE=by_choice,
            ALPHA=self.layer.alpha,
            LIMIT=self.layer.limit,
            GELU=self.layer.gelu,
            BLOCK_M=tile.block_m,
            STAGES=tile.stages,
            SLABS=tile.slabs,
            CONSUMER=consumer,
            PRODUCER=loading,
            PDL=self.pdl,
            num_warps=4,
            pdl=self.pdl,
            maxnreg=registers,
        )


def blocks_of(experts: Tensor, num_experts: int, tile: Fp8ExpertTile, *, pdl: bool) -> Blocks:
    """Blocks of the pairs of [T, k] experts; up to SINGLE_TOKENS tokens every pair is one."""
    if len(experts) <= SINGLE_TOKENS:
        return Blocks(experts.view(-1))
    pairs, block_experts = group(experts, num_experts, block_m=tile.block_m, pdl=pdl)
    return Blocks(block_experts, pairs)


def fp8_expert_sums(
    rounded: RoundedInputs,  # of [T, H]
    layer: PackedExperts,
    weights: Tensor,  # [T, k]
    blocks: Blocks,  # for these tiles
    tiles: tuple[Fp8ExpertTile, Fp8ExpertTile],  # of gate_up and of down
    *,
    by_choice: bool,
    pdl: bool,
) -> Tensor:
    """Three launches: gate_up, round, down. [T * k, H], or `by_choice` [k, T, H]: the weighted result of each pair; of
    pairs that are in no block nothing is written."""
    _, hidden_size, size = layer.down.shape
    (num_tokens, top_k), num_pairs = weights.shape, weights.numel()
    slots = num_pairs if blocks.pairs is None else len(blocks.pairs)
    multiply = _Product(layer, blocks, weights, pdl)
    hidden = torch.empty(slots, size, dtype=weights.dtype, device=weights.device)
    multiply(rounded, layer.gate_up, hidden, tiles[0], is_gated=True)
    rounded = round_slots(hidden, blocks, num_pairs, layer.down, pdl=pdl)
    y = torch.empty(num_pairs, hidden_size, dtype=weights.dtype, device=weights.device)
    multiply(rounded, layer.down, y, tiles[1], is_gated=False, by_choice=by_choice)
    return y.view(top_k, num_tokens, hidden_size) if by_choice else y


def fp8_experts(
    x: Tensor,  # [T, H] bfloat16 or float16
    layer: PackedExperts,
    weights: Tensor,  # [T, k]
    experts: Tensor,  # [T, k]
    out: Tensor,  # [T, H]
    residual: Tensor | None,
    *,
    tiles: tuple[Fp8ExpertTile, Fp8ExpertTile] | None = None,
    pdl: bool,
) -> Tensor:
    """Six launches. Returns `out`."""
    num_experts = layer.down.shape[0]
    tiles = tiles or fp8_expert_tiles(len(x), num_experts, experts.shape[1])
    rounded = round_inputs(x, layer.gate_up.scale.shape[-1], layer.gate_up.distance, pdl=pdl)
    blocks = blocks_of(experts, num_experts, tiles[0], pdl=pdl)
    y = fp8_expert_sums(rounded, layer, weights, blocks, tiles, by_choice=False, pdl=pdl)
    return sum_choices(y, experts, num_experts, out, residual, pdl=pdl)
