"""The experts of many tokens with MXFP4 weights, on Hopper: a kernel with a warp of its own for loads.

As linear/packed_wide.py it computes W x^T with the weight unpacked in registers, the left operand of wgmma. A producer
warp loads ahead with TMA, into a ring of shared-memory stages: the words of 256 columns and the inputs of the same
columns. TMA reads adjacent rows only, so the inputs are put in the order of the blocks of `group` first; what gate_up
writes stays in this order, and `down` writes each pair's result to the pair's row. Scales are multiplied into the
numbers, exactly (`scaled_fp4`).

Written in Gluon, as many_rows.py. Gluon has no interpreter: tests without a GPU only compile the kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2
from nanovllm.kernels.linear.many_rows import _async_load, _barrier
from nanovllm.kernels.linear.packed import SCALED_FP4, PackedWords, fp4_factors, scaled_fp4
from nanovllm.kernels.linear.packed_wide import _load_words
from nanovllm.kernels.linear.tiled import num_sms
from nanovllm.kernels.linear.wide_tile import PRODUCER_REGISTERS, SHARED_BYTES, SLAB_ROWS
from nanovllm.kernels.moe.activation import gated
from nanovllm.kernels.moe.grouped import group, sum_choices
from nanovllm.kernels.moe.weights import PackedExperts

ROWS = gl.constexpr(SLAB_ROWS)
PRODUCER = gl.constexpr(PRODUCER_REGISTERS)
COLUMNS = gl.constexpr(256)  # of a stage
WORDS = gl.constexpr(32)  # of a row in a stage
SLABS = gl.constexpr(3)  # of 64 rows of the weight per tile, each for one consumer warpgroup
# per thread when the kernel starts, and of consumers when the producer has given most of its own back
REGISTERS = 128
CONSUMER_REGISTERS = gl.constexpr((4 * REGISTERS - PRODUCER_REGISTERS) // 3 // 8 * 8)


def wide_block_m(pairs_per_expert: float) -> int:
    """Pairs per tile: the fastest for gpt-oss-20b on an H200 at 8, 32 and 128 pairs per expert; between, reckoned."""
    if pairs_per_expert <= 8:
        return 16
    return 32 if pairs_per_expert <= 20 else 64


def num_stages(block_m: int) -> int:
    """As many as fit in shared memory."""
    return SHARED_BYTES // (SLABS.value * SLAB_ROWS * WORDS.value * 4 + block_m * COLUMNS.value * 2)


@triton.jit(do_not_specialize=["num_pairs"])
def _gather_kernel(
    x,  # [num_pairs / SHARED, K]
    pairs,  # [max_blocks * BLOCK_M]
    block_experts,  # [max_blocks]
    out,  # [max_blocks * BLOCK_M, K], written: the row of each pair
    num_pairs,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(block_experts + slot // BLOCK_M) < 0:
        return
    pair = tl.load(pairs + slot)
    if pair < num_pairs:
        row = tl.load(x + (pair // SHARED).to(tl.int64) * K + k, mask=k < K)
        tl.store(out + slot.to(tl.int64) * K + k, row, mask=k < K)


@gluon.jit
def _produce(
    x, words, xs, ws, full, empty, block_experts, num_tiles, N: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr
):
    """The producer warp: inputs and words of every tile of this program."""
    STAGES: gl.constexpr = full.shape[0]
    GATED: gl.constexpr = len(ws.shape) == 4
    BLOCK_M: gl.constexpr = xs.shape[1]
    it = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        block = index // TILES
        expert = gl.load(block_experts + block)
        if expert >= 0:
            for step in range(STEPS):
                slot = it % STAGES
                mbarrier.wait(empty.index(slot), it // STAGES & 1 ^ 1)  # returns at once for a new barrier and parity 1
                mbarrier.expect(full.index(slot), (BLOCK_M * COLUMNS * 2 + SLABS * ROWS * WORDS * 4))
                _async_load(x, [block * BLOCK_M, step * COLUMNS], full.index(slot), xs.index(slot))
                for s in gl.static_range(SLABS):
                    slab = index % TILES * SLABS + s
                    if GATED:
                        at = [expert * 2, slab * (ROWS // 2), step * WORDS]
                    else:
                        at = [expert * N + slab * ROWS, step * WORDS]
                    _async_load(words, at, full.index(slot), ws.index(slot * SLABS + s))
                it += 1


@gluon.constexpr_function
def _spans_layout(distance: int):
    """[64 rows, spans, words of a span], as `_words_layout` has [64, words]."""
    width = distance // 2
    bases = [
        [[8, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
    ]
    bases = [[[row, word // width, word % width] for row, word in one] for one in bases]
    return gl.DistributedLinearLayout(*bases, [], [64, 32 // width, width])


@gluon.jit
def _exponents(scale, rows, step, K: gl.constexpr, DISTANCE: gl.constexpr):
    """[64, spans] of a stage, as words: two or four bytes each."""
    SPANS: gl.constexpr = K // (4 * DISTANCE)
    EACH: gl.constexpr = COLUMNS // (4 * DISTANCE)
    TYPE: gl.constexpr = gl.int16 if DISTANCE == 16 else gl.int32
    span = step * EACH + gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(2, _spans_layout(DISTANCE))))
    span = gl.minimum(span, SPANS - 1)  # past the last one the words are zeros
    pointers = scale.to(gl.pointer_type(TYPE)) + gl.expand_dims(rows.to(gl.int64) * SPANS, 1) + gl.expand_dims(span, 0)
    return gl.load(pointers).to(gl.int32)


@gluon.jit
def _unpacked(words, exponents, DISTANCE: gl.constexpr):
    """[64, 256] bfloat16, the numbers times their scales and SCALED_FP4."""
    EACH: gl.constexpr = COLUMNS // (4 * DISTANCE)
    LAYOUT: gl.constexpr = _spans_layout(DISTANCE)
    codes = gl.convert_layout(gl.reshape(words, [ROWS, EACH, DISTANCE // 2]), LAYOUT, assert_trivial=True)
    pairs = ()  # type: tuple
    for pair in gl.static_range(4):
        factors = gl.expand_dims(fp4_factors(exponents, pair * DISTANCE // 32), 2)
        pairs += (scaled_fp4(codes, factors, pair, False),)
    joined = gl.join(gl.join(pairs[0], pairs[1]), gl.join(pairs[2], pairs[3]))  # [64, span, word, half, pair, pair]
    return gl.reshape(gl.permute(joined, [0, 1, 5, 4, 2, 3]), [ROWS, COLUMNS])


@gluon.jit
def _multiply(rings, weight, groups, sizes, FORMAT: gl.constexpr, G: gl.constexpr):
    """Consumer warpgroup G: multiply and store its rows of the weight in every tile of this program."""
    xs, ws, full, empty = rings
    scale, bias = weight
    pairs, block_experts, routing, out = groups
    num_pairs, num_tiles = sizes
    N: gl.constexpr = FORMAT[0]
    K: gl.constexpr = FORMAT[1]
    DISTANCE: gl.constexpr = FORMAT[2]
    ALPHA: gl.constexpr = FORMAT[3]
    LIMIT: gl.constexpr = FORMAT[4]
    GELU: gl.constexpr = FORMAT[5]
    TILES: gl.constexpr = FORMAT[6]
    STEPS: gl.constexpr = FORMAT[7]
    STAGES: gl.constexpr = full.shape[0]
    GATED: gl.constexpr = len(ws.shape) == 4
    BLOCK_M: gl.constexpr = xs.shape[1]
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SCALES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _spans_layout(DISTANCE)))
    it = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        block = index // TILES
        first_n = (index % TILES * SLABS + G) * WIDTH
        expert = gl.load(block_experts + block)
        if expert >= 0:
            rows = _weight_rows(gl.arange(0, ROWS, SCALES), expert, first_n, N, GATED)
            exponents = _exponents(scale, rows, 0, K, DISTANCE)
            y = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
            for step in range(STEPS):
                slot = it % STAGES
                now = exponents
                exponents = _exponents(scale, rows, step + 1, K, DISTANCE)  # loaded while this stage is multiplied
                mbarrier.wait(full.index(slot), it // STAGES & 1)
                left = _unpacked(_load_words(ws.index(slot * SLABS + G)), now, DISTANCE)
                left = gl.convert_layout(left, LEFT, assert_trivial=True)
                y = warpgroup_mma(left, xs.index(slot).permute([1, 0]), y, is_async=True)
                y = warpgroup_mma_wait(0, deps=[y])
                _barrier()
                mbarrier.arrive(empty.index(slot), count=1)
                it += 1
            y *= 1 / SCALED_FP4
            if bias is not None:
                rows = _weight_rows(gl.arange(0, ROWS, gl.SliceLayout(1, MMA)), expert, first_n, N, GATED)
                y += gl.expand_dims(gl.load(bias + rows).to(gl.float32), 1)
            if GATED:
                gate, up = gl.split(gl.permute(gl.reshape(y, [4, 2, 8, BLOCK_M]), [0, 2, 3, 1]))
                y = gl.reshape(gated(gate, up, ALPHA, LIMIT, GELU), [WIDTH, BLOCK_M])
            _store(y, pairs, routing, out, block, first_n, num_pairs, N, GATED)


@gluon.jit
def _weight_rows(j, expert, first_n, N: gl.constexpr, GATED: gl.constexpr):
    """Rows of the weights of all experts. Gated: one thread must hold a gate and its up, which are eight rows apart."""
    if GATED:
        rows = expert * (2 * N) + gl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
    else:
        rows = expert * N + gl.minimum(first_n + j, N - 1)
    return rows


@gluon.jit
def _store(y, pairs, routing, out, block, first_n, num_pairs, N: gl.constexpr, GATED: gl.constexpr):
    """The results of gate_up in the order of blocks; of down in the order of pairs, times the routing weight."""
    WIDTH: gl.constexpr = y.shape[0]
    BLOCK_M: gl.constexpr = y.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [WIDTH // 8, 256 // WIDTH], [1, 4], [0, 1])
    n = gl.expand_dims(first_n + gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT)), 1)
    slot = block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    if GATED:
        y = gl.convert_layout(y.to(out.dtype.element_ty), LAYOUT)
        gl.store(out + gl.expand_dims(slot, 0).to(gl.int64) * N + n, y, mask=n < N)
    else:
        pair = gl.load(pairs + slot)
        valid = pair < num_pairs
        weight = gl.load(routing + pair, mask=valid, other=0.0).to(gl.float32)
        y = gl.convert_layout(y, LAYOUT) * gl.expand_dims(weight, 0)
        mask = (n < N) & gl.expand_dims(valid, 0)
        gl.store(out + gl.expand_dims(pair, 0).to(gl.int64) * N + n, y.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _packed_wide_experts_kernel(
    x,
    words,
    scale,
    bias,  # [E, rows] or None; rows: N, or gated 2 * N
    pairs,  # [num_blocks * BLOCK_M]
    block_experts,  # [num_blocks], -1 for unused blocks
    routing,  # [num_pairs], the routing weights; not used if gated
    out,  # [num_pairs, N], or gated [num_blocks * BLOCK_M, N]
    num_pairs,
    num_blocks,
    N: gl.constexpr,
    K: gl.constexpr,
    DISTANCE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    GELU: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    WIDTH: gl.constexpr = ROWS // 2 if len(words.block_shape) == 3 else ROWS
    TILES: gl.constexpr = (N + SLABS * WIDTH - 1) // (SLABS * WIDTH)
    STEPS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    BLOCK_M: gl.constexpr = x.block_shape[0]
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, COLUMNS], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * SLABS] + words.block_shape, words.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=SLABS)
    fence_async_shared()
    _barrier()
    num_tiles = num_blocks * TILES
    rings = xs, ws, full, empty
    weight = scale, bias
    groups = pairs, block_experts, routing, out
    sizes = num_pairs, num_tiles
    FORMAT: gl.constexpr = (N, K, DISTANCE, ALPHA, LIMIT, GELU, TILES, STEPS)
    gl.warp_specialize(
        [
            (_multiply, (rings, weight, groups, sizes, FORMAT, 0)),
            (_multiply, (rings, weight, groups, sizes, FORMAT, 1)),
            (_multiply, (rings, weight, groups, sizes, FORMAT, 2)),
            (_produce, (x, words, xs, ws, full, empty, block_experts, num_tiles, N, TILES, STEPS)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER],
    )


def packed_wide_experts(
    x: Tensor,  # [T, H] bfloat16
    layer: PackedExperts,
    weights: Tensor,  # [T, k]
    experts: Tensor,  # [T, k]
    out: Tensor,  # [T, H]
    residual: Tensor | None,
    block_m: int,  # 16, 32 or 64
    *,
    pdl: bool,
) -> Tensor:
    """Five launches: group, gather, gate_up, down, sum. Returns `out`."""
    num_experts, hidden_size, size = layer.down.shape
    top_k, num_pairs = experts.shape[1], experts.numel()
    pairs, block_experts = group(experts, num_experts, block_m=block_m, pdl=pdl)
    gathered = torch.empty(pairs.numel(), hidden_size, dtype=x.dtype, device=x.device)
    launch(
        _gather_kernel,
        (pairs.numel(),),
        x,
        pairs,
        block_experts,
        gathered,
        num_pairs,
        K=hidden_size,
        SHARED=top_k,
        BLOCK_M=block_m,
        BLOCK_K=next_power_of_2(hidden_size),
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
    hidden = torch.empty(pairs.numel(), size, dtype=x.dtype, device=x.device)
    y = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)

    def multiply(x: Tensor, weight: PackedWords, bias: Tensor | None, out: Tensor, *, is_gated: bool) -> None:
        n, k, row_words = out.shape[1], x.shape[1], weight.words.shape[-1]
        rows = SLAB_ROWS // 2 if is_gated else SLAB_ROWS
        if is_gated:
            shape, strides, block = (
                [2 * num_experts, n, row_words],
                [n * row_words, row_words, 1],
                [2, rows, WORDS.value],
            )
        else:
            shape, strides, block = [num_experts * n, row_words], [row_words, 1], [rows, WORDS.value]
        x_block = [block_m, COLUMNS.value]
        launch(
            _packed_wide_experts_kernel,
            (min(num_sms(), block_experts.numel() * cdiv(n, rows * SLABS.value)),),
            TensorDescriptor(x, [x.shape[0], k], [k, 1], x_block, gl.NVMMASharedLayout(128, 16, rank=2)),
            TensorDescriptor(weight.words, shape, strides, block, gl.NVMMASharedLayout(128, 32, rank=len(shape))),
            weight.scale,
            bias,
            pairs,
            block_experts,
            weights,
            out,
            num_pairs,
            block_experts.numel(),
            N=n,
            K=k,
            DISTANCE=weight.distance,
            ALPHA=layer.alpha,
            LIMIT=layer.limit,
            GELU=layer.gelu,
            STAGES=num_stages(block_m),
            PDL=pdl,
            num_warps=4,
            pdl=pdl,
            maxnreg=REGISTERS,
        )

    multiply(gathered, layer.gate_up, layer.gate_up_bias, hidden, is_gated=True)
    multiply(hidden, layer.down, layer.down_bias, y, is_gated=False)
    return sum_choices(y, experts, num_experts, out, residual, pdl=pdl)
