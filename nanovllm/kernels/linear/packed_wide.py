"""A linear layer with a packed weight for tens to hundreds of rows on Hopper, with its own warps for loads.

As packed_tiled.py it computes W x^T with the weight unpacked in registers, the left operand of wgmma. Two producer
warps load ahead with TMA, into two rings of shared-memory stages: one the words of the weight, a span of columns per
stage, the other the inputs of one pair of each word. One to three consumer warpgroups each take 64 rows of the weight:
while one unpacks words, applies scales or waits, the tensor cores multiply for the others.

Written in Gluon, as many_rows.py. Gluon has no interpreter: tests without a GPU only compile the kernel.
"""

from dataclasses import dataclass

import torch
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

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.many_rows import NEIGHBOURS, _async_load, _barrier
from nanovllm.kernels.linear.packed import PackedWords, numbers, scales
from nanovllm.kernels.linear.packed_tiled import MAX_SPLITS, _groups
from nanovllm.kernels.linear.tiled import num_sms

ROWS = gl.constexpr(64)  # of the weight per consumer warpgroup
SHARED_BYTES = 208 * 1024  # for the rings and sums: the compiler takes some to transpose results
WORDS_BYTES = 80 * 1024  # of them for the words, at most


@dataclass(frozen=True)
class WideTile:
    block_m: int  # rows of x
    slabs: int  # of 64 rows of the weight
    k_parts: int = 1  # warpgroups that share a slab: each takes every such span of K

    @property
    def rows(self) -> int:  # of the weight
        return self.slabs * ROWS.value


@gluon.jit
def _tile(index, tiles_m, tiles_n, SPANS: gl.constexpr, SPLITS: gl.constexpr):
    """A tile's place: rows of x, rows of the weight, and its part of K. Neighbours in time read the same words."""
    split = index // (tiles_m * tiles_n)
    index = index % (tiles_m * tiles_n)
    first = index // (NEIGHBOURS * tiles_n) * NEIGHBOURS
    size = gl.minimum(tiles_m - first, NEIGHBOURS)
    within = index % (NEIGHBOURS * tiles_n)
    return first + within % size, within // size, split, SPANS * split // SPLITS, SPANS * (split + 1) // SPLITS


@gluon.jit
def _produce_words(words, ws, full, empty, tiles_m, tiles_n, SPANS: gl.constexpr, SPLITS: gl.constexpr):
    """A producer warp: the words of every tile of this program."""
    STAGES: gl.constexpr = full.shape[0]
    GROUPS: gl.constexpr = ws.shape[0] // STAGES
    GATED: gl.constexpr = len(ws.shape) == 4
    WIDTH: gl.constexpr = ws.shape[-1]
    # Span `it`, counted over all tiles, uses stage it % STAGES. The stage's `empty` barrier has completed it // STAGES
    # phases when all warpgroups have released its previous span. Waiting for parity 1 of a new barrier returns.
    it = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n * SPLITS, gl.num_programs(0)):
        _, n, _, first, last = _tile(index, tiles_m, tiles_n, SPANS, SPLITS)
        for span in range(first, last):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
            mbarrier.expect(full.index(slot), GROUPS * ROWS * WIDTH * 4)
            for g in gl.static_range(GROUPS):
                slab = n * GROUPS + g
                at = [0, slab * (ROWS // 2), span * WIDTH] if GATED else [slab * ROWS, span * WIDTH]
                _async_load(words, at, full.index(slot), ws.index(slot * GROUPS + g))
            it += 1


@gluon.jit
def _produce_inputs(
    x, xs, full, empty, tiles_m, tiles_n, SPANS: gl.constexpr, SPLITS: gl.constexpr, PAIRS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A producer warp: the inputs of every tile of this program, in the order of columns."""
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = xs.shape[1]
    DISTANCE: gl.constexpr = xs.shape[2]
    if PDL:
        gdc_wait()
    it = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n * SPLITS, gl.num_programs(0)):
        m, _, _, first, last = _tile(index, tiles_m, tiles_n, SPANS, SPLITS)
        for piece in range(first * PAIRS, last * PAIRS):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
            mbarrier.expect(full.index(slot), BLOCK_M * DISTANCE * 2)
            _async_load(x, [m * BLOCK_M, piece * DISTANCE], full.index(slot), xs.index(slot))
            it += 1


@gluon.constexpr_function
def _words_layout(width: int, gated: bool):
    """[64 rows, width words] as a left operand of wgmma has its pairs of 16-bit columns: thread 4 r + l of a warp of 16
    rows has rows r and r + 8 and every fourth word from l on. Gated: [2, 32, width], rows r + 8 are those of up."""
    every_fourth = [[0, 1 << i] for i in range(2, width.bit_length() - 1)]
    bases = [[[8, 0], *every_fourth], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]]
    if not gated:
        return gl.DistributedLinearLayout(*bases, [], [64, width])
    bases = [[[row >> 3 & 1, row >> 4 << 3 | row & 7, word] for row, word in one] for one in bases]
    return gl.DistributedLinearLayout(*bases, [], [2, 32, width])


@gluon.jit
def _load_words(ws):
    """The words of a stage for one warpgroup, [64, words]. Gated: eight rows of gate, then eight of up."""
    GATED: gl.constexpr = len(ws.shape) == 3
    WIDTH: gl.constexpr = ws.shape[-1]
    words = ws.load(_words_layout(WIDTH, GATED))
    if GATED:
        words = gl.reshape(gl.permute(gl.reshape(words, [2, 4, 8, WIDTH]), [1, 0, 2, 3]), [ROWS, WIDTH])
    return gl.convert_layout(words, _words_layout(WIDTH, False), assert_trivial=True)


@gluon.jit
def _release(empty, it):
    """Give stage `it` back to its producer when all four warps have come here."""
    _barrier()
    mbarrier.arrive(empty.index(it % empty.shape[0]), count=1)


@gluon.jit
def _store(out, y, first_m, first_n, split, M, N, GATED: gl.constexpr):
    """The activation, and the result to memory, transposed."""
    BLOCK_M: gl.constexpr = y.shape[1]
    WIDTH: gl.constexpr = y.shape[0] // 2 if GATED else y.shape[0]
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(y, [4, 2, 8, BLOCK_M]), [0, 2, 3, 1]))
        y = gl.reshape(gate / (1 + gl.exp(-gate)) * up, [WIDTH, BLOCK_M])
    EACH: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([EACH, 1], [WIDTH // EACH, 32 * EACH // WIDTH], [1, 4], [0, 1])
    y = gl.convert_layout(y.to(out.dtype.element_ty), LAYOUT)
    n = gl.expand_dims(first_n + gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT)), 1)
    m = gl.expand_dims(first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(out + (split * M + m).to(gl.int64) * N + n, y, mask=(m < M) & (n < N))


@gluon.jit
def _multiply(rings, weight, out, sizes, FORMAT: gl.constexpr, G: gl.constexpr):
    """Consumer warpgroup G: multiply and store its rows of the weight in every tile of this program."""
    xs, ws, x_full, x_empty, w_full, w_empty, sums_of, sums_full, sums_empty = rings
    scale, zero, scale_unit, bias = weight
    M, N, tiles_m, tiles_n = sizes
    K: gl.constexpr = FORMAT[0]
    KIND: gl.constexpr = FORMAT[1]
    PAIRS: gl.constexpr = FORMAT[2]
    GROUPS: gl.constexpr = FORMAT[3]
    UNITS: gl.constexpr = FORMAT[4]
    SCALE_ROWS: gl.constexpr = FORMAT[5]
    SPLITS: gl.constexpr = FORMAT[6]
    K_PARTS: gl.constexpr = FORMAT[7]
    STAGES: gl.constexpr = w_full.shape[0]
    X_STAGES: gl.constexpr = x_full.shape[0]
    SLABS: gl.constexpr = ws.shape[0] // STAGES
    GATED: gl.constexpr = len(ws.shape) == 4
    BLOCK_M: gl.constexpr = xs.shape[1]
    DISTANCE: gl.constexpr = xs.shape[2]
    SPAN: gl.constexpr = DISTANCE * PAIRS
    GROUP: gl.constexpr = K // GROUPS
    PARTS: gl.constexpr = max(1, SPAN // GROUP)
    PIECES: gl.constexpr = PAIRS // PARTS
    SPANS: gl.constexpr = K // SPAN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SLAB: gl.constexpr = G % SLABS
    K_PART: gl.constexpr = G // SLABS
    j = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    begun = 0  # spans before this tile
    phase = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n * SPLITS, gl.num_programs(0)):
        tile_m, tile_n, split, first, last = _tile(index, tiles_m, tiles_n, SPANS, SPLITS)
        first_n = (tile_n * SLABS + SLAB) * (ROWS // 2 if GATED else ROWS)
        if GATED:
            w_rows = gl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
        else:
            w_rows = gl.minimum(first_n + j, N - 1)
        found = _groups(
            scale, zero, None, scale_unit, None, w_rows, gl.minimum(first + K_PART, SPANS - 1), SPAN, GROUP,
            KIND, GROUPS, UNITS, SCALE_ROWS,
        )  # fmt: skip
        y = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
        for span in range(first + K_PART, last, K_PARTS):
            it = begun + span - first
            mbarrier.wait(w_full.index(it % STAGES), it // STAGES & 1)
            words = _load_words(ws.index(it % STAGES * SLABS + SLAB))
            _release(w_empty, it)
            found_scales, _, found_zeros = found
            # those of the next span: they are loaded while this one is multiplied
            found = _groups(
                scale, zero, None, scale_unit, None, w_rows, gl.minimum(span + K_PARTS, SPANS - 1), SPAN, GROUP, KIND,
                GROUPS, UNITS, SCALE_ROWS,
            )  # fmt: skip
            for part in gl.static_range(PARTS):
                zeros = None
                if len(found_zeros) > 0:
                    zeros = found_zeros[part]
                    if zero is not None:
                        zeros = gl.convert_layout(zeros, words.type.layout, assert_trivial=True)
                sums = y if GROUPS == 1 else gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
                for i in gl.static_range(PIECES):
                    pair = part * PIECES + i
                    left = gl.reshape(numbers(words, zeros, pair, KIND, xs.dtype, False), [ROWS, DISTANCE])
                    left = gl.convert_layout(left, LEFT, assert_trivial=True)
                    piece = it * PAIRS + pair
                    mbarrier.wait(x_full.index(piece % X_STAGES), piece // X_STAGES & 1)
                    right = xs.index(piece % X_STAGES).permute([1, 0])
                    sums = warpgroup_mma(left, right, sums, use_acc=GROUPS == 1 or i > 0, is_async=True)
                sums = warpgroup_mma_wait(0, deps=[sums])
                _barrier()
                for i in gl.static_range(PIECES):
                    piece = it * PAIRS + part * PIECES + i
                    mbarrier.arrive(x_empty.index(piece % X_STAGES), count=1)
                if GROUPS == 1:
                    y = sums
                else:
                    y += sums * gl.expand_dims(found_scales[part], 1)
        begun += last - first
        if K_PART > 0:
            mbarrier.wait(sums_empty.index(SLAB), phase ^ 1)
            sums_of.index((K_PART - 1) * SLABS + SLAB).store(y)
            _barrier()
            mbarrier.arrive(sums_full.index(SLAB), count=1)
        else:
            if K_PARTS > 1:
                mbarrier.wait(sums_full.index(SLAB), phase)
                for part in gl.static_range(K_PARTS - 1):
                    y += sums_of.index(part * SLABS + SLAB).load(MMA)
                _barrier()
                mbarrier.arrive(sums_empty.index(SLAB), count=1)
            if GROUPS == 1:
                y *= gl.expand_dims(scales(scale, scale_unit, w_rows, 0, None, GROUPS, UNITS, SCALE_ROWS), 1)
            if bias is not None:
                y += gl.expand_dims(gl.where(split == 0, gl.load(bias + w_rows).to(gl.float32), 0.0), 1)
            _store(out, y, tile_m * BLOCK_M, first_n, split, M, N, GATED)
        phase ^= 1


@gluon.jit(do_not_specialize=["M"])
def _packed_wide_kernel(
    x,
    words,
    scale,
    zero,
    scale_unit,
    bias,
    out,
    M,
    N,  # columns of `out`
    K: gl.constexpr,
    KIND: gl.constexpr,
    PAIRS: gl.constexpr,
    DISTANCE: gl.constexpr,
    GROUPS: gl.constexpr,
    UNITS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SLABS: gl.constexpr,
    K_PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    GATED: gl.constexpr = len(words.block_shape) == 3
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    xs = gl.allocate_shared_memory(x.dtype, [X_STAGES, BLOCK_M, DISTANCE], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * SLABS] + words.block_shape, words.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums_of = xs  # not used
    if K_PARTS > 1:
        SUMS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
        sums_of = gl.allocate_shared_memory(gl.float32, [(K_PARTS - 1) * SLABS, ROWS, BLOCK_M], SUMS)
    sums_full = gl.allocate_shared_memory(gl.int64, [SLABS, 1], mbarrier.MBarrierLayout())
    sums_empty = gl.allocate_shared_memory(gl.int64, [SLABS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLABS):
        mbarrier.init(sums_full.index(s), count=max(1, K_PARTS - 1))
        mbarrier.init(sums_empty.index(s), count=1)
    for s in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(s), count=1)
        mbarrier.init(x_empty.index(s), count=SLABS)
    for s in gl.static_range(STAGES):
        mbarrier.init(w_full.index(s), count=1)
        mbarrier.init(w_empty.index(s), count=SLABS)
    fence_async_shared()
    _barrier()
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + SLABS * WIDTH - 1) // (SLABS * WIDTH)
    SPANS: gl.constexpr = K // (DISTANCE * PAIRS)
    weight = scale, zero, scale_unit, bias
    rings = xs, ws, x_full, x_empty, w_full, w_empty, sums_of, sums_full, sums_empty
    sizes = M, N, tiles_m, tiles_n
    FORMAT: gl.constexpr = (K, KIND, PAIRS, GROUPS, UNITS, SCALE_ROWS, SPLITS, K_PARTS)
    if SLABS * K_PARTS == 1:
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, out, sizes, FORMAT, 0)),
                (_produce_words, (words, ws, w_full, w_empty, tiles_m, tiles_n, SPANS, SPLITS)),
                (_produce_inputs, (x, xs, x_full, x_empty, tiles_m, tiles_n, SPANS, SPLITS, PAIRS, PDL)),
            ],
            [1, 1],
            [24, 24],
        )
    elif SLABS * K_PARTS == 2:
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, out, sizes, FORMAT, 0)),
                (_multiply, (rings, weight, out, sizes, FORMAT, 1)),
                (_produce_words, (words, ws, w_full, w_empty, tiles_m, tiles_n, SPANS, SPLITS)),
                (_produce_inputs, (x, xs, x_full, x_empty, tiles_m, tiles_n, SPANS, SPLITS, PAIRS, PDL)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, out, sizes, FORMAT, 0)),
                (_multiply, (rings, weight, out, sizes, FORMAT, 1)),
                (_multiply, (rings, weight, out, sizes, FORMAT, 2)),
                (_produce_words, (words, ws, w_full, w_empty, tiles_m, tiles_n, SPANS, SPLITS)),
                (_produce_inputs, (x, xs, x_full, x_empty, tiles_m, tiles_n, SPANS, SPLITS, PAIRS, PDL)),
            ],
            [4, 4, 1, 1],
            [160, 160, 24, 24],
        )


def packed_wide_serves(weight: PackedWords) -> bool:
    return weight.minimum is None


def wide_tile(m: int, num_weight_rows: int) -> WideTile:
    return WideTile(32 if m <= 32 else 64 if m <= 64 else 128, 2)


def packed_wide_linear(
    x: Tensor,  # [M, K] bfloat16 or float16
    weight: PackedWords,  # [N, K]; gated: the gate rows, then the up rows
    bias: Tensor | None = None,  # [N]
    *,
    gated: bool = False,
    pdl: bool = False,
    tile: WideTile | None = None,
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    m, num_weight_rows = x.shape[0], weight.shape[0]
    out = x.new_empty(m, num_weight_rows // 2 if gated else num_weight_rows)
    _launch(x, weight, bias, out, tile or wide_tile(m, num_weight_rows), splits=1, gated=gated, pdl=pdl)
    return out


def packed_wide_split_k_linear(
    x: Tensor,  # [M, K] bfloat16 or float16
    weight: PackedWords,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    pdl: bool = False,
    tile: WideTile | None = None,
    splits: int | None = None,
) -> Tensor:  # [splits, M, N] float32
    m, n = x.shape[0], weight.shape[0]
    tile = tile or wide_tile(m, n)
    if splits is None:
        tiles, splits = cdiv(n, tile.rows) * cdiv(m, tile.block_m), MAX_SPLITS
        while splits > 1 and tiles * splits > num_sms():
            splits //= 2
    splits = min(splits, weight.words.shape[-1] // (weight.distance // 2))
    out = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, tile, splits=splits, gated=False, pdl=pdl)
    return out


def _launch(
    x: Tensor,
    weight: PackedWords,
    bias: Tensor | None,
    out: Tensor,
    tile: WideTile,
    *,
    splits: int,
    gated: bool,
    pdl: bool,
) -> None:
    (m, k), (num_weight_rows, words_each) = x.shape, weight.words.shape
    assert packed_wide_serves(weight) and weight.shape[1] == k and x.stride(1) == 1 and weight.words.is_contiguous()
    n, width = out.shape[-1], weight.distance // 2
    swizzle = 2 * weight.distance  # bytes: the length of a row, of words and of inputs
    if gated:
        shape, strides, block = [2, n, words_each], [n * words_each, words_each, 1], [2, ROWS.value // 2, width]
    else:
        shape, strides, block = [n, words_each], [words_each, 1], [ROWS.value, width]
    words_layout = gl.NVMMASharedLayout(swizzle, 32, rank=len(shape))
    x_block = [tile.block_m, weight.distance]
    stage_bytes, x_bytes = tile.rows * width * 4, tile.block_m * weight.distance * 2
    sums_bytes = (tile.k_parts - 1) * tile.rows * tile.block_m * 4
    stages = min(WORDS_BYTES // stage_bytes, 16)
    tiles = cdiv(num_weight_rows, tile.rows) * cdiv(m, tile.block_m) * splits
    launch(
        _packed_wide_kernel,
        (min(num_sms(), tiles),),
        TensorDescriptor(x, [m, k], list(x.stride()), x_block, gl.NVMMASharedLayout(swizzle, 16, rank=2)),
        TensorDescriptor(weight.words, shape, strides, block, words_layout),
        weight.scale,
        weight.zero,
        weight.scale_unit,
        bias,
        out,
        m,
        n,
        K=k,
        **weight.constants,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        SLABS=tile.slabs,
        K_PARTS=tile.k_parts,
        STAGES=stages,
        X_STAGES=min((SHARED_BYTES - sums_bytes - stages * stage_bytes) // x_bytes, 16),
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
