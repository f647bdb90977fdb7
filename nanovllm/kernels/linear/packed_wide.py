"""A linear layer with a packed weight for 1 to 2,047 rows on Hopper, with its own warps for loads.

As packed_tiled.py it computes W x^T with the weight unpacked in registers, the left operand of wgmma. Two producer
warps load ahead with TMA, into two rings of shared-memory stages: one the words of the weight, a span of columns per
stage, the other the inputs of one pair of each word. Two or three consumer warpgroups each take a slab of 64 rows of
the weight, or take the spans of one slab in turn: while one unpacks words, applies scales or waits, the tensor cores
multiply for the others. wide_tile.py says which of that is fastest.

For up to 64 rows scales multiply the sums of a group's products. For more, and for small groups, that would cost more
than the tensor cores: there scales multiply the weight. The result is rounded to the inputs' type, as where a weight is
dequantized before a 16-bit product, and so is the scale before that.

Written in Gluon, as many_rows.py. Gluon has no interpreter: tests without a GPU only compile the kernel.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.many_rows import _async_load, _barrier, tile_place
from nanovllm.kernels.linear.packed import PackedWords, numbers, scaled_numbers, scales
from nanovllm.kernels.linear.packed_tiled import _groups
from nanovllm.kernels.linear.tiled import num_sms
from nanovllm.kernels.linear.wide_tile import (
    MAX_SPLITS,
    PRODUCER_REGISTERS,
    SLAB_ROWS,
    SYNCHRONOUS_ROWS,
    WideTile,
    wide_tile,
)

ROWS = gl.constexpr(SLAB_ROWS)
SYNCHRONOUS = gl.constexpr(SYNCHRONOUS_ROWS)
PRODUCER = gl.constexpr(PRODUCER_REGISTERS)
COLUMNS_AT_ONCE = gl.constexpr(128)


@gluon.jit
def _tile(index, tiles_m, tiles_n, SPANS: gl.constexpr, SPLITS: gl.constexpr):
    """A tile's place: rows of x, rows of the weight, and its part of K. Neighbours in time read the same words."""
    split = index // (tiles_m * tiles_n)
    m, n = tile_place(index % (tiles_m * tiles_n), tiles_m, tiles_n)
    return m, n, split, SPANS * split // SPLITS, SPANS * (split + 1) // SPLITS


@gluon.jit
def _stage(full, part, count, K_PARTS: gl.constexpr):
    """The stage for load `count` of a K part, and the parity of the phase that its `full` barrier then completes.

    Each K part has stages of its own. In shared ones it could come so early that the phase before the one it waits for,
    of another part's load, is not complete: the last complete phase then has the parity it waits for.
    """
    STAGES: gl.constexpr = full.shape[0] // K_PARTS
    return part * STAGES + count % STAGES, count // STAGES & 1


@gluon.jit
def _produce_words(
    words, ws, full, empty, tiles_m, tiles_n, SPANS: gl.constexpr, SPLITS: gl.constexpr, K_PARTS: gl.constexpr
):
    """A producer warp: the words of every tile of this program. K parts take spans in turn, counted over all tiles."""
    GROUPS: gl.constexpr = ws.shape[0] // full.shape[0]
    GATED: gl.constexpr = len(ws.shape) == 4
    WIDTH: gl.constexpr = ws.shape[-1]
    it = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n * SPLITS, gl.num_programs(0)):
        _, n, _, first, last = _tile(index, tiles_m, tiles_n, SPANS, SPLITS)
        for span in range(first, last):
            slot, phase = _stage(full, it % K_PARTS, it // K_PARTS, K_PARTS)
            mbarrier.wait(empty.index(slot), phase ^ 1)  # returns at once for a new barrier and parity 1
            mbarrier.expect(full.index(slot), GROUPS * ROWS * WIDTH * 4)
            for g in gl.static_range(GROUPS):
                slab = n * GROUPS + g
                at = [0, slab * (ROWS // 2), span * WIDTH] if GATED else [slab * ROWS, span * WIDTH]
                _async_load(words, at, full.index(slot), ws.index(slot * GROUPS + g))
            it += 1


@gluon.jit
def _produce_inputs(
    x, xs, full, empty, tiles_m, tiles_n, SPANS: gl.constexpr, SPLITS: gl.constexpr, PAIRS: gl.constexpr,
    K_PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A producer warp: the inputs of every tile of this program, in the order of columns."""
    PIECES: gl.constexpr = xs.shape[0] // full.shape[0]
    BLOCK_M: gl.constexpr = xs.shape[1]
    DISTANCE: gl.constexpr = xs.shape[2]
    if PDL:
        gdc_wait()
    it = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n * SPLITS, gl.num_programs(0)):
        m, _, _, first, last = _tile(index, tiles_m, tiles_n, SPANS, SPLITS)
        for span in range(first, last):
            for i in gl.static_range(PAIRS // PIECES):
                slot, phase = _stage(full, it % K_PARTS, it // K_PARTS * (PAIRS // PIECES) + i, K_PARTS)
                mbarrier.wait(empty.index(slot), phase ^ 1)
                mbarrier.expect(full.index(slot), PIECES * BLOCK_M * DISTANCE * 2)
                for j in gl.static_range(PIECES):
                    at = [m * BLOCK_M, (span * PAIRS + i * PIECES + j) * DISTANCE]
                    _async_load(x, at, full.index(slot), xs.index(slot * PIECES + j))
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
def _release(empty, slot):
    """Give a stage back to its producer when all four warps have come here."""
    _barrier()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _operand(
    words, found, PAIR: gl.constexpr, PAIRS: gl.constexpr, PARTS: gl.constexpr, KIND: gl.constexpr,
    ITEM: gl.constexpr, SCALED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pair PAIR of each word as a left operand, [64, distance]; SCALED: multiplied with its scale."""
    PART: gl.constexpr = PAIR * PARTS // PAIRS
    found_scales, _, found_zeros = found
    zeros = None
    if len(found_zeros) > 0:
        zeros = found_zeros[PART]
        if zeros.type.is_block():
            zeros = gl.convert_layout(zeros, words.type.layout, assert_trivial=True)
    if SCALED:
        scale = gl.convert_layout(gl.expand_dims(found_scales[PART], 1), words.type.layout, assert_trivial=True)
        left = scaled_numbers(words, zeros, scale, PAIR, KIND, ITEM)
    else:
        left = numbers(words, zeros, PAIR, KIND, ITEM, False)
    return gl.convert_layout(gl.reshape(left, [ROWS, 2 * words.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.jit
def _begin_product(left, x, sums, USE_ACC: gl.constexpr):
    """sums + left x^T; for more rows than SYNCHRONOUS it is running when this returns."""
    if x.shape[0] <= SYNCHRONOUS:
        right = x.permute([1, 0]).load(gl.DotOperandLayout(1, sums.type.layout, 2))
        return mma_v2(left, right, sums)
    else:
        return warpgroup_mma(left, x.permute([1, 0]), sums, use_acc=USE_ACC, is_async=True)


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
    SCALED: gl.constexpr = FORMAT[8]
    SLABS: gl.constexpr = ws.shape[0] // w_full.shape[0]
    STAGE_PIECES: gl.constexpr = xs.shape[0] // x_full.shape[0]
    GATED: gl.constexpr = len(ws.shape) == 4
    BLOCK_M: gl.constexpr = xs.shape[1]
    DISTANCE: gl.constexpr = xs.shape[2]
    SPAN: gl.constexpr = DISTANCE * PAIRS
    GROUP: gl.constexpr = K // GROUPS
    PARTS: gl.constexpr = max(1, SPAN // GROUP)
    SUMMED: gl.constexpr = GROUPS > 1 and not SCALED  # sums of groups are multiplied with scales
    # pairs to multiply before waiting for the tensor cores: a group's, or as many as registers can hold
    AT_ONCE: gl.constexpr = PAIRS // PARTS if SUMMED else min(PAIRS, COLUMNS_AT_ONCE // DISTANCE)
    SPANS: gl.constexpr = K // SPAN
    SYNC: gl.constexpr = BLOCK_M <= SYNCHRONOUS
    MMA: gl.constexpr = (
        gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
        if SYNC
        else gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SLAB: gl.constexpr = G % SLABS
    K_PART: gl.constexpr = G // SLABS
    j = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    begun = 0  # spans before this tile
    sums_phase = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n * SPLITS, gl.num_programs(0)):
        tile_m, tile_n, split, first, last = _tile(index, tiles_m, tiles_n, SPANS, SPLITS)
        first_n = (tile_n * SLABS + SLAB) * (ROWS // 2 if GATED else ROWS)
        if GATED:
            w_rows = gl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
        else:
            w_rows = gl.minimum(first_n + j, N - 1)
        own = first + (K_PART + K_PARTS - begun % K_PARTS) % K_PARTS  # the first span that is this K part's
        found = _groups(
            scale, zero, None, scale_unit, None, w_rows, gl.minimum(own, SPANS - 1), SPAN, GROUP, KIND, GROUPS, UNITS,
            SCALE_ROWS,
        )  # fmt: skip
        y = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
        for span in range(own, last, K_PARTS):
            # This K part's spans before this one. Computed from `begun`, not counted: Triton (3.6) drops a variable of
            # the outer loop if only the bounds of an inner loop depend on it.
            it = (begun + span - first) // K_PARTS
            slot, phase = _stage(w_full, K_PART, it, K_PARTS)
            mbarrier.wait(w_full.index(slot), phase)
            words = _load_words(ws.index(slot * SLABS + SLAB))
            _release(w_empty, slot)
            of_span = found
            # those of the next span: they are loaded while this one is multiplied
            found = _groups(
                scale, zero, None, scale_unit, None, w_rows, gl.minimum(span + K_PARTS, SPANS - 1), SPAN, GROUP, KIND,
                GROUPS, UNITS, SCALE_ROWS,
            )  # fmt: skip
            for part in gl.static_range(PAIRS // AT_ONCE):
                sums = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA) if SUMMED else y
                for i in gl.static_range(AT_ONCE):
                    left = _operand(
                        words, of_span, part * AT_ONCE + i, PAIRS, PARTS, KIND, xs.dtype, SCALED, LEFT
                    )  # fmt: skip
                    pair = part * AT_ONCE + i
                    slot, phase = _stage(x_full, K_PART, (it * PAIRS + pair) // STAGE_PIECES, K_PARTS)
                    if pair % STAGE_PIECES == 0:
                        mbarrier.wait(x_full.index(slot), phase)
                    right = xs.index(slot * STAGE_PIECES + pair % STAGE_PIECES)
                    sums = _begin_product(left, right, sums, not SUMMED or i > 0)
                if not SYNC:
                    sums = warpgroup_mma_wait(0, deps=[sums])
                    _barrier()
                    for i in gl.static_range(AT_ONCE):
                        slot, _ = _stage(x_full, K_PART, it * PAIRS + part * AT_ONCE + i, K_PARTS)
                        mbarrier.arrive(x_empty.index(slot), count=1)
                if SUMMED:
                    y += sums * gl.expand_dims(of_span[0][part], 1)
                else:
                    y = sums
            if SYNC:
                slot, _ = _stage(x_full, K_PART, it, K_PARTS)
                _release(x_empty, slot)
        begun += last - first
        if K_PART > 0:
            mbarrier.wait(sums_empty.index(SLAB), sums_phase ^ 1)
            sums_of.index((K_PART - 1) * SLABS + SLAB).store(y)
            _barrier()
            mbarrier.arrive(sums_full.index(SLAB), count=1)
        else:
            if K_PARTS > 1:
                mbarrier.wait(sums_full.index(SLAB), sums_phase)
                for part in gl.static_range(K_PARTS - 1):
                    y += sums_of.index(part * SLABS + SLAB).load(MMA)
                _barrier()
                mbarrier.arrive(sums_empty.index(SLAB), count=1)
            if GROUPS == 1:
                y *= gl.expand_dims(scales(scale, scale_unit, w_rows, 0, None, GROUPS, UNITS, SCALE_ROWS), 1)
            if bias is not None:
                y += gl.expand_dims(gl.where(split == 0, gl.load(bias + w_rows).to(gl.float32), 0.0), 1)
            _store(out, y, tile_m * BLOCK_M, first_n, split, M, N, GATED)
        sums_phase ^= 1


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
    REGISTERS: gl.constexpr,  # of consumers
    SCALED: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    GATED: gl.constexpr = len(words.block_shape) == 3
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    STAGE_PIECES: gl.constexpr = PAIRS if BLOCK_M <= SYNCHRONOUS else 1
    xs = gl.allocate_shared_memory(x.dtype, [X_STAGES * STAGE_PIECES, BLOCK_M, DISTANCE], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * SLABS] + words.block_shape, words.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums_of = xs  # not used
    if K_PARTS > 1:
        SUMS: gl.constexpr = gl.NVMMASharedLayout(min(128, 4 * BLOCK_M), 32, rank=2)
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
    FORMAT: gl.constexpr = (K, KIND, PAIRS, GROUPS, UNITS, SCALE_ROWS, SPLITS, K_PARTS, SCALED)
    if SLABS * K_PARTS == 2:
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, out, sizes, FORMAT, 0)),
                (_multiply, (rings, weight, out, sizes, FORMAT, 1)),
                (_produce_words, (words, ws, w_full, w_empty, tiles_m, tiles_n, SPANS, SPLITS, K_PARTS)),
                (_produce_inputs, (x, xs, x_full, x_empty, tiles_m, tiles_n, SPANS, SPLITS, PAIRS, K_PARTS, PDL)),
            ],
            [4, 1, 1],
            [REGISTERS, PRODUCER, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (rings, weight, out, sizes, FORMAT, 0)),
                (_multiply, (rings, weight, out, sizes, FORMAT, 1)),
                (_multiply, (rings, weight, out, sizes, FORMAT, 2)),
                (_produce_words, (words, ws, w_full, w_empty, tiles_m, tiles_n, SPANS, SPLITS, K_PARTS)),
                (_produce_inputs, (x, xs, x_full, x_empty, tiles_m, tiles_n, SPANS, SPLITS, PAIRS, K_PARTS, PDL)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, PRODUCER, PRODUCER],
        )


def packed_wide_serves(weight: PackedWords) -> bool:
    return weight.minimum is None


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
    tile = tile or wide_tile(m, num_weight_rows, x.shape[1], most_splits=1, num_sms=num_sms())[0]
    _launch(x, weight, bias, out, tile, splits=1, gated=gated, pdl=pdl)
    return out


def packed_wide_split_k_linear(
    x: Tensor,  # [M, K] bfloat16 or float16
    weight: PackedWords,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    pdl: bool = False,
    tile: WideTile | None = None,
    splits: int = 1,  # of a given tile
) -> Tensor:  # [splits, M, N] float32
    (m, k), n = x.shape, weight.shape[0]
    num_spans = weight.words.shape[-1] // (weight.distance // 2)
    if tile is None:
        tile, splits = wide_tile(m, n, k, most_splits=min(MAX_SPLITS, num_spans), num_sms=num_sms())
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
    stages, x_stages = tile.stages(weight)
    registers, consumer_registers = tile.registers
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
        X_STAGES=x_stages,
        REGISTERS=consumer_registers,
        SCALED=tile.scales_weight(weight),
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
        maxnreg=registers,
    )
