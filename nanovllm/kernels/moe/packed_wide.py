"""The experts of many tokens with MXFP4 weights, on Hopper: a kernel with a warp of its own for loads.

As linear/packed_wide.py it computes W x^T with the weight unpacked in registers, the left operand of wgmma. A producer
warp loads ahead with TMA, into a ring of shared-memory stages: the words of 256 columns and the inputs of the same
columns. TMA reads adjacent rows only, so the inputs are put in the order of the blocks of `group` first; what gate_up
writes stays in this order, and `down` writes each pair's result to the pair's row. Scales are multiplied into the
numbers, exactly, as `scaled_fp4` of linear/packed.py does.

The warps that multiply bound the kernel, not memory: they unpack, and with 64 pairs per block the tensor cores are busy
for three quarters of the time. So a factor is computed for two scales at once, the tensor cores multiply half a stage
while the other half is unpacked, columns that do not fill a stage are a short one, and of a block of 64 only 16 or 32
pairs are multiplied where it has no more. All warpgroups of a program come to the end of a tile at about the same time;
with blocks of 16 two or three programs share a multiprocessor, so that others multiply meanwhile.

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
from nanovllm.kernels.linear.packed import SCALED_FP4, PackedWords
from nanovllm.kernels.linear.packed_wide import _load_words
from nanovllm.kernels.linear.tiled import num_sms
from nanovllm.kernels.linear.wide_tile import PRODUCER_REGISTERS, SHARED_BYTES, SLAB_ROWS, WideTile
from nanovllm.kernels.moe.activation import gated
from nanovllm.kernels.moe.forms import WideForm
from nanovllm.kernels.moe.grouped import group, sum_choices
from nanovllm.kernels.moe.scaled_fp4 import exponents_of, factors_of, half, halves_of, spans_layout, unpacked
from nanovllm.kernels.moe.weights import PackedExperts

ROWS = gl.constexpr(SLAB_ROWS)
PRODUCER = gl.constexpr(PRODUCER_REGISTERS)
COLUMNS = gl.constexpr(256)  # of a stage
WORDS = gl.constexpr(32)  # of a row in a stage
PIECE = gl.constexpr(128)  # columns that are unpacked together, and multiplied while the next are
EXPERT_TILES = (WideTile(16, 1, programs=3), WideTile(16, 2, programs=2), WideTile(32, 4), WideTile(64, 3))


def expert_wide_tile(pairs_per_expert: float) -> WideTile:
    """The fastest for gpt-oss-20b on an H200 at 1, 2, 4, 8, 32 and 128 pairs per expert; between, reckoned."""
    least, small, medium, large = EXPERT_TILES
    if pairs_per_expert <= 8:
        return least if pairs_per_expert <= 2 else small
    return medium if pairs_per_expert <= 24 else large


def least_height(tile: WideTile, pairs_per_expert: float) -> int:
    """For gpt-oss-20b, multiplying only the pairs that a block has is faster at 256 tokens, not at 512."""
    return 16 if tile.block_m == 64 and pairs_per_expert <= 48 else tile.block_m


def num_stages(tile: WideTile) -> int:
    """As many as fit in shared memory."""
    return SHARED_BYTES // tile.programs // (tile.rows * WORDS.value * 4 + tile.block_m * COLUMNS.value * 2)


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
def _load_stage(words, ws, full, slot, expert, first_slab, column, N: gl.constexpr, X_BYTES: gl.constexpr):
    """The words of a stage. Its inputs are loaded, too, before it is full."""
    SLABS: gl.constexpr = ws.shape[0] // full.shape[0]
    mbarrier.expect(full.index(slot), X_BYTES + SLABS * ROWS * WORDS * 4)
    for s in gl.static_range(SLABS):
        if len(ws.shape) == 4:
            at = [expert * 2, (first_slab + s) * (ROWS // 2), column // 8]
        else:
            at = [expert * N + (first_slab + s) * ROWS, column // 8]
        _async_load(words, at, full.index(slot), ws.index(slot * SLABS + s))


@gluon.jit
def _produce(rings, x, words, block_experts, num_tiles, FORM: gl.constexpr, PDL: gl.constexpr):
    """The producer warp: inputs and words of every tile of this program.

    The kernel before this one writes only the inputs, and began after the blocks were written: words of the first
    stages are loaded while it still runs.
    """
    xs, ws, full, empty = rings
    N: gl.constexpr = FORM.N
    K: gl.constexpr = FORM.K
    TILES: gl.constexpr = FORM.TILES
    STEPS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    LAST: gl.constexpr = STEPS - 1 if K % COLUMNS > 0 else 0  # columns that do not fill a stage come first
    STAGES: gl.constexpr = full.shape[0]
    SLABS: gl.constexpr = ws.shape[0] // STAGES
    PIECES: gl.constexpr = COLUMNS // PIECE
    BLOCK_M: gl.constexpr = xs.shape[1]
    X_BYTES: gl.constexpr = BLOCK_M * COLUMNS * 2
    EARLY: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    expert = gl.load(block_experts + gl.program_id(0) // TILES)
    if expert >= 0:
        for step in gl.static_range(EARLY):
            first_slab = gl.program_id(0) % TILES * SLABS
            _load_stage(words, ws, full, step, expert, first_slab, (step + LAST) % STEPS * COLUMNS, N, X_BYTES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    it = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        block = index // TILES
        expert = gl.load(block_experts + block)
        if expert >= 0:
            for step in range(STEPS):
                slot = it % STAGES
                column = (step + LAST) % STEPS * COLUMNS
                if it >= EARLY:
                    # returns at once for a new barrier and parity 1
                    mbarrier.wait(empty.index(slot), it // STAGES & 1 ^ 1)
                    _load_stage(words, ws, full, slot, expert, index % TILES * SLABS, column, N, X_BYTES)
                for p in gl.static_range(PIECES):
                    at = [block * BLOCK_M, column + p * PIECE]
                    _async_load(x, at, full.index(slot), xs.index(slot * PIECES + p))
                it += 1


@gluon.jit
def _multiply(rings, weight, groups, sizes, FORM: gl.constexpr, G: gl.constexpr):
    """Consumer warpgroup G: multiply and store its rows of the weight in every tile of this program."""
    xs, ws, full, _ = rings
    pairs, block_experts, _, _ = groups
    num_pairs, num_tiles = sizes
    TILES: gl.constexpr = FORM.TILES
    LEAST: gl.constexpr = FORM.LEAST
    SLABS: gl.constexpr = ws.shape[0] // full.shape[0]
    BLOCK_M: gl.constexpr = xs.shape[1]
    WIDTH: gl.constexpr = ROWS // 2 if len(ws.shape) == 4 else ROWS
    slot, phase = 0, 0
    expert = gl.load(block_experts + gl.program_id(0) // TILES)
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        block = index // TILES
        place = block, expert, (index % TILES * SLABS + G) * WIDTH
        following = gl.load(block_experts + gl.minimum(index + gl.num_programs(0), num_tiles - 1) // TILES)
        if expert >= 0:
            if LEAST == BLOCK_M:
                slot, phase = _tile(rings, weight, groups, num_pairs, place, slot, phase, FORM, G, BLOCK_M)
            elif gl.load(pairs + block * BLOCK_M + LEAST) >= num_pairs:
                slot, phase = _tile(rings, weight, groups, num_pairs, place, slot, phase, FORM, G, LEAST)
            elif gl.load(pairs + block * BLOCK_M + 2 * LEAST) >= num_pairs:
                slot, phase = _tile(rings, weight, groups, num_pairs, place, slot, phase, FORM, G, 2 * LEAST)
            else:
                slot, phase = _tile(rings, weight, groups, num_pairs, place, slot, phase, FORM, G, BLOCK_M)
        expert = following


@gluon.jit
def _tile(rings, weight, groups, num_pairs, place, slot, phase, FORM: gl.constexpr, G: gl.constexpr,
          HEIGHT: gl.constexpr):  # fmt: skip
    """One tile, with the first HEIGHT pairs of its block: there are no others. Returns the next slot of the ring and
    the phase of its barrier."""
    xs, ws, full, empty = rings
    scale, bias = weight
    pairs, _, routing, out = groups
    block, expert, first_n = place
    N: gl.constexpr = FORM.N
    K: gl.constexpr = FORM.K
    DISTANCE: gl.constexpr = FORM.DISTANCE
    STAGES: gl.constexpr = full.shape[0]
    SLABS: gl.constexpr = ws.shape[0] // STAGES
    GATED: gl.constexpr = len(ws.shape) == 4
    MMA: gl.constexpr = _mma_layout(HEIGHT)
    SPANS: gl.constexpr = K // (4 * DISTANCE)
    EACH: gl.constexpr = COLUMNS // (4 * DISTANCE)  # spans of a stage
    STEPS: gl.constexpr = SPANS // EACH  # with all columns
    SHORT: gl.constexpr = triton.next_power_of_2(SPANS % EACH) if SPANS % EACH > 0 else 0
    SCALES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, spans_layout(DISTANCE, WORDS)))
    TYPE: gl.constexpr = gl.int16 if DISTANCE == 16 else gl.int32
    rows = _weight_rows(gl.arange(0, ROWS, SCALES), expert, first_n, N, GATED)
    pointers = scale.to(gl.pointer_type(TYPE)) + rows.to(gl.int64) * SPANS
    if SHORT > 0:
        tail = exponents_of(pointers, STEPS * EACH, SHORT, SPANS - 1, DISTANCE)
    exponents = exponents_of(pointers, 0, EACH, SPANS - 1, DISTANCE)
    if bias is not None:
        rows = _weight_rows(gl.arange(0, ROWS, gl.SliceLayout(1, MMA)), expert, first_n, N, GATED)
        own_bias = gl.load(bias + rows).to(gl.float32)
    places = _places(pairs, routing, block * xs.shape[1], num_pairs, HEIGHT, GATED)
    y = gl.zeros([ROWS, HEIGHT], gl.float32, MMA)
    if SHORT > 0:
        mbarrier.wait(full.index(slot), phase)
        words = _load_words(ws.index(slot * SLABS + G))
        y = _add_columns(y, words, xs, slot, 0, factors_of(tail, DISTANCE), DISTANCE, HEIGHT)
        slot, phase, y = _finish_stage(empty, slot, phase, y)
    for step in range(STEPS):
        factors = factors_of(exponents, DISTANCE)
        # of the next stage, loaded while this one is multiplied
        exponents = exponents_of(pointers, gl.minimum(step + 1, STEPS - 1) * EACH, EACH, None, DISTANCE)
        mbarrier.wait(full.index(slot), phase)
        y = _add_columns(y, _load_words(ws.index(slot * SLABS + G)), xs, slot, 0, factors, DISTANCE, HEIGHT)
        slot, phase, y = _finish_stage(empty, slot, phase, y)
    y *= 1 / SCALED_FP4
    if bias is not None:
        y += gl.expand_dims(own_bias, 1)
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(y, [4, 2, 8, HEIGHT]), [0, 2, 3, 1]))
        y = gl.reshape(gated(gate, up, FORM.ALPHA, FORM.LIMIT, FORM.GELU), [ROWS // 2, HEIGHT])
    _store(y, places, out, first_n, num_pairs, N, GATED, FORM.CHOICES)
    return slot, phase


@gluon.constexpr_function
def _mma_layout(height: int):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, height, 16])


@gluon.jit
def _add_columns(
    y, words, xs, slot, FIRST: gl.constexpr, factors, DISTANCE: gl.constexpr, HEIGHT: gl.constexpr
):  # fmt: skip
    """Begin to add the products of columns from FIRST on of a stage, as many as there are factors for: those of one
    piece are multiplied while the next are unpacked. `words` of further columns are not used."""
    COUNT: gl.constexpr = factors[0].shape[1] * 4 * DISTANCE
    if words.shape[1] * 8 > COUNT:
        y = _add_columns(y, half(words, False), xs, slot, FIRST, factors, DISTANCE, HEIGHT)
    elif COUNT > PIECE:
        first, second = halves_of(factors, False), halves_of(factors, True)
        y = _add_columns(y, half(words, False), xs, slot, FIRST, first, DISTANCE, HEIGHT)
        y = _add_columns(y, half(words, True), xs, slot, FIRST + COUNT // 2, second, DISTANCE, HEIGHT)
    else:
        left = unpacked(words, factors, DISTANCE)
        left = gl.convert_layout(left, gl.DotOperandLayout(0, _mma_layout(HEIGHT), 2), assert_trivial=True)
        x = xs.index(slot * (COLUMNS // PIECE) + FIRST // PIECE)
        if COUNT < PIECE:
            x = x.slice(0, COUNT, dim=1)
        if x.shape[0] > HEIGHT:
            x = x.slice(0, HEIGHT, dim=0)
        y = warpgroup_mma(left, x.permute([1, 0]), y, is_async=True)
    return y


@gluon.jit
def _finish_stage(empty, slot, phase, y):
    """Wait for the products of a stage and give it back to the producer. Returns the next slot of the ring, the phase
    of its barrier, and the sums."""
    y = warpgroup_mma_wait(0, deps=[y])
    _barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    last = slot == empty.shape[0] - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase), y


@gluon.jit
def _weight_rows(j, expert, first_n, N: gl.constexpr, GATED: gl.constexpr):
    """Rows of the weights of all experts. Gated: one thread must hold a gate and its up, which are eight rows apart."""
    if GATED:
        rows = expert * (2 * N) + gl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
    else:
        rows = expert * N + gl.minimum(first_n + j, N - 1)
    return rows


@gluon.constexpr_function
def _store_layout(width: int):
    return gl.BlockedLayout([8, 1], [width // 8, 256 // width], [1, 4], [0, 1])


@gluon.jit
def _places(pairs, routing, begin, num_pairs, HEIGHT: gl.constexpr, GATED: gl.constexpr):
    """Where a block's results are written, and their routing weights. Of gate_up: in the order of blocks."""
    place = begin + gl.arange(0, HEIGHT, gl.SliceLayout(0, _store_layout(ROWS // 2 if GATED else ROWS)))
    if GATED:
        found = (place,)  # type: tuple
    else:
        pair = gl.load(pairs + begin + gl.arange(0, HEIGHT, gl.SliceLayout(0, _mma_layout(HEIGHT))))
        found = (gl.load(pairs + place), gl.load(routing + pair, mask=pair < num_pairs, other=0.0))
    return found


@gluon.jit
def _store(y, places, out, first_n, num_pairs, N: gl.constexpr, GATED: gl.constexpr, CHOICES: gl.constexpr):
    LAYOUT: gl.constexpr = _store_layout(y.shape[0])
    place = places[0]
    n = gl.expand_dims(first_n + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    if GATED:
        row, inside = place, n < N
    else:
        y *= gl.expand_dims(places[1].to(gl.float32), 0)
        row = place % CHOICES * (num_pairs // CHOICES) + place // CHOICES
        inside = (n < N) & (gl.expand_dims(place, 0) < num_pairs)
    pointers = out + gl.expand_dims(row, 0).to(gl.int64) * N + n
    gl.store(pointers, gl.convert_layout(y.to(out.dtype.element_ty), LAYOUT), mask=inside)


@gluon.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _packed_wide_experts_kernel(
    x,
    words,
    scale,
    bias,  # [E, rows] or None; rows: N, or gated 2 * N
    pairs,  # [num_blocks * BLOCK_M]
    block_experts,  # [num_blocks], -1 for unused blocks
    routing,  # [num_pairs], the routing weights; not used if gated
    out,  # [num_pairs, N], with CHOICES in the order of choices; or gated [num_blocks * BLOCK_M, N]
    num_pairs,
    num_blocks,
    N: gl.constexpr,
    K: gl.constexpr,
    DISTANCE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    GELU: gl.constexpr,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,  # of 64 rows of the weight per tile, each for one consumer warpgroup
    REGISTERS: gl.constexpr,  # of consumers
    CHOICES: gl.constexpr,  # of a token, or 1
    LEAST: gl.constexpr,  # pairs of a block that are multiplied: these, twice as many or all; or always all
    PDL: gl.constexpr,
):
    WIDTH: gl.constexpr = ROWS // 2 if len(words.block_shape) == 3 else ROWS
    TILES: gl.constexpr = (N + SLABS * WIDTH - 1) // (SLABS * WIDTH)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * (COLUMNS // PIECE)] + x.block_shape, x.layout)
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
    FORM: gl.constexpr = WideForm(N, K, DISTANCE, ALPHA, LIMIT, GELU, TILES, CHOICES, LEAST)
    if SLABS == 1:
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, groups, sizes, FORM, 0)),
                (_produce, (rings, x, words, block_experts, num_tiles, FORM, PDL)),
            ],
            [1],
            [PRODUCER],
        )
    elif SLABS == 2:
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, groups, sizes, FORM, 0)),
                (_multiply, (rings, weight, groups, sizes, FORM, 1)),
                (_produce, (rings, x, words, block_experts, num_tiles, FORM, PDL)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER],
        )
    elif SLABS == 3:
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, groups, sizes, FORM, 0)),
                (_multiply, (rings, weight, groups, sizes, FORM, 1)),
                (_multiply, (rings, weight, groups, sizes, FORM, 2)),
                (_produce, (rings, x, words, block_experts, num_tiles, FORM, PDL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER],
        )
    else:
        gl.static_assert(SLABS == 4)
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, groups, sizes, FORM, 0)),
                (_multiply, (rings, weight, groups, sizes, FORM, 1)),
                (_multiply, (rings, weight, groups, sizes, FORM, 2)),
                (_multiply, (rings, weight, groups, sizes, FORM, 3)),
                (_produce, (rings, x, words, block_experts, num_tiles, FORM, PDL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, PRODUCER],
        )


def packed_wide_experts(
    x: Tensor,  # [T, H] bfloat16
    layer: PackedExperts,
    weights: Tensor,  # [T, k]
    experts: Tensor,  # [T, k]
    out: Tensor,  # [T, H]
    residual: Tensor | None,
    tile: WideTile,
    *,
    in_parts: bool = False,
    pdl: bool,
) -> Tensor:
    """Five launches: group, gather, gate_up, down, sum. Returns `out`; `in_parts` without the last one, [k, T, H]."""
    num_experts, hidden_size, size = layer.down.shape
    top_k, num_pairs = experts.shape[1], experts.numel()
    registers, consumer_registers = tile.registers
    least = least_height(tile, num_pairs / num_experts)
    # tiles of one round take as long as each other if blocks of as many pairs are neighbours
    largest_first = least < tile.block_m
    pairs, block_experts = group(experts, num_experts, block_m=tile.block_m, largest_first=largest_first, pdl=pdl)
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
        BLOCK_M=tile.block_m,
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
        x_block = [tile.block_m, PIECE.value]
        launch(
            _packed_wide_experts_kernel,
            (min(tile.programs * num_sms(), block_experts.numel() * cdiv(n, rows * tile.slabs)),),
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
            STAGES=num_stages(tile),
            SLABS=tile.slabs,
            REGISTERS=consumer_registers,
            CHOICES=top_k if in_parts else 1,
            LEAST=least,
            PDL=pdl,
            num_warps=4,
            pdl=pdl,
            maxnreg=registers,
        )

    multiply(gathered, layer.gate_up, layer.gate_up_bias, hidden, is_gated=True)
    multiply(hidden, layer.down, layer.down_bias, y, is_gated=False)
    if in_parts:
        return y.view(top_k, -1, hidden_size)
    return sum_choices(y, experts, num_experts, out, residual, pdl=pdl)
