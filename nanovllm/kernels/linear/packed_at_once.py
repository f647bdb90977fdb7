"""A linear layer with a packed integer weight for 1 to 8 rows on Hopper: programs request all their words at once.

Reading the weight limits the speed, so many bytes must be on their way at all times: while another program multiplies,
and while the kernel before this one ends. So each program copies its part of the weight into shared memory with its
first instructions, asynchronously, and then waits for x. Two or three programs share a multiprocessor: some wait for
memory, others multiply.

Words become the left operand of the tensor cores in registers (see fragments.py), x is the right one, whose columns are
its rows. The warps of a program divide K. A number q of 4 bits becomes 128 + q (bfloat16) or 1024 + q (float16) by its
bits alone; what is too much is subtracted from a group's sum in float32: it is a multiple of the sum of the group's
inputs, which one more product with ones gives.

Written in Gluon, as many_rows.py. Gluon has no interpreter: tests without a GPU only compile the kernel.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.at_once_tile import AtOnceTile, at_once_tile
from nanovllm.kernels.linear.few_rows import _replaced
from nanovllm.kernels.linear.one_row import weight_rows
from nanovllm.kernels.linear.packed import PackedWords, items_of, of_part, offset_of_part, parts_of, raw_numbers

# names of Triton 3.7 and later, or of 3.6
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
MAX_ROWS = 8
ROWS = gl.constexpr(MAX_ROWS)
DISTANCE = gl.constexpr(64)  # between the pairs of a word


@gluon.constexpr_function
def _tile_layout(rows: int, warps: int):
    """[rows, 32 words of each warp]: thread 4 r + l has words 4 l to 4 l + 3 of every sixteen of rows r and r + 8."""
    registers = [[0, 1], [0, 2], [0, 16], *([[8, 0]] if rows == 16 else [])]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    each = [[0, 32 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, each, [], [rows, 32 * warps])


@gluon.jit
def _by_warp(tile):
    """[rows, 32 words of each warp] as [4 lanes, 8 rows, warps, eights of rows, 2, 4 words]."""
    EIGHTS: gl.constexpr = tile.shape[0] // 8
    WARPS: gl.constexpr = tile.shape[1] // 32
    return gl.permute(gl.reshape(tile, [EIGHTS, 8, WARPS, 2, 4, 4]), [4, 1, 2, 0, 3, 5])


@gluon.jit
def _in_mma_order(items):
    """[4 lanes, 8 rows, warps, eights, 2, 4 words, 2 items] as [warps, rows, columns]: words 0 and 1 of a thread belong
    to one instruction, 2 and 3 to the next, so that registers need not be moved."""
    WARPS: gl.constexpr = items.shape[2]
    EIGHTS: gl.constexpr = items.shape[3]
    items = gl.permute(gl.reshape(items, [4, 8, WARPS, EIGHTS, 2, 2, 2, 2]), [2, 3, 1, 4, 6, 0, 5, 7])
    return gl.reshape(items, [WARPS, EIGHTS * 8, 64])


@gluon.jit
def _inputs(pointers, portion: gl.constexpr, WARPS: gl.constexpr, PAIRS: gl.constexpr, PARTS: gl.constexpr):
    """Rows of x in words of two items, [8 rows, 32 words of each warp] for each pair of a group."""
    found = ()  # type: tuple
    for i in gl.static_range(PAIRS // PARTS):
        found += (
            gl.load(
                pointers
                + (portion // PARTS * (WARPS * PAIRS) + portion % PARTS * (PAIRS // PARTS) + i) * (DISTANCE // 2)
            ),
        )
    return found


@gluon.jit
def _store(out, y, first_n, split, M, N):
    """Columns of the result, [columns, rows], transposed to memory."""
    LAYOUT: gl.constexpr = y.type.layout
    n = gl.expand_dims(first_n + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    m = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(out + (split * M + m) * N + n, y.to(out.dtype.element_ty), mask=(m < M) & (n < N))


@gluon.jit(do_not_specialize=["M"])
def _packed_at_once_kernel(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    M,
    N,  # columns of `out`
    x_stride,
    K: gl.constexpr,
    KIND: gl.constexpr,
    PAIRS: gl.constexpr,
    GROUPS: gl.constexpr,
    SPLITS: gl.constexpr,  # parts of K that programs of their own compute
    SIXTEENS: gl.constexpr,  # blocks of sixteen rows of the weight
    WARPS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    ITEM: gl.constexpr = x.dtype.element_ty
    SPAN: gl.constexpr = DISTANCE * PAIRS
    STEPS: gl.constexpr = K // (SPAN * WARPS * SPLITS)
    PARTS: gl.constexpr = max(1, SPAN * GROUPS // K)  # groups of a span
    EACH: gl.constexpr = PAIRS // PARTS  # pairs of a group
    WIDTH: gl.constexpr = 8 if GATED else 16
    CORRECTED: gl.constexpr = KIND == "int4" or zero is not None
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    OF_ROWS: gl.constexpr = gl.SliceLayout(2, MMA)
    W_TILE: gl.constexpr = _tile_layout(16, WARPS)
    X_TILE: gl.constexpr = _tile_layout(8, WARPS)
    first_n = gl.program_id(0) * (SIXTEENS * WIDTH)
    split = gl.program_id(1)

    # the words, [16, 32 words of each warp] for each step and block of rows
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])  # rows r and r + 1 of a column have other banks
    j = gl.arange(0, 16, gl.SliceLayout(1, COPY))
    column = gl.expand_dims(gl.arange(0, 32 * WARPS, gl.SliceLayout(0, COPY)), 0) + split * (STEPS * WARPS * 32)
    tiles = ()  # type: tuple
    for step in gl.static_range(STEPS):
        for block in gl.static_range(SIXTEENS):
            rows = weight_rows(j, first_n + block * WIDTH, N, GATED).to(gl.int64)
            tiles += (gl.allocate_shared_memory(gl.int32, [16, 32 * WARPS], SHARED),)
            _async_load(
                tiles[step * SIXTEENS + block],
                words + gl.expand_dims(rows * (K // (2 * PAIRS)), 1) + column + step * (WARPS * 32),
            )
        async_copy.commit_group()
    # and scales and zeros
    span = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, OF_ROWS)), 1) + split * (STEPS * WARPS)
    n = gl.arange(0, 16, gl.SliceLayout(0, OF_ROWS))
    found_scales = ()  # type: tuple
    found_zeros = ()  # type: tuple
    for step in gl.static_range(STEPS):
        for block in gl.static_range(SIXTEENS):
            rows = gl.expand_dims(weight_rows(n, first_n + block * WIDTH, N, GATED), 0)
            if GROUPS > 1:
                found_scales += (parts_of(scale, rows, span, step * WARPS, K // SPAN, GROUPS),)
            if zero is not None:
                found_zeros += (parts_of(zero, rows, span, step * WARPS, K // SPAN, GROUPS),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    # rows past the end repeat the last one: their results are not stored
    x_row = gl.minimum(gl.arange(0, 8, gl.SliceLayout(1, X_TILE)), M - 1)
    c = gl.expand_dims(gl.arange(0, 32 * WARPS, gl.SliceLayout(0, X_TILE)), 0)
    x_words = x.to(gl.pointer_type(gl.int32), bitcast=True)
    x_pointers = x_words + gl.expand_dims(x_row * (x_stride // 2), 1) + (c // 32 * (SPAN // 2) + c % 32)
    x_pointers += split * (STEPS * WARPS * SPAN // 2)
    PORTIONS: gl.constexpr = STEPS * PARTS
    coming = _inputs(x_pointers, 0, WARPS, PAIRS, PARTS)
    ys = ()  # type: tuple
    for _ in gl.static_range(SIXTEENS):
        ys += (gl.zeros([WARPS, 16, ROWS], gl.float32, MMA),)
    for portion in gl.static_range(PORTIONS):
        bs = ()  # type: tuple
        totals = gl.zeros([WARPS, 16, ROWS], gl.float32, MMA)
        for i in gl.static_range(EACH):
            b = gl.permute(_in_mma_order(items_of(_by_warp(coming[i]), ITEM)), [0, 2, 1])
            b = gl.convert_layout(b, RIGHT, assert_trivial=True)
            if CORRECTED:
                totals = mma_v2(gl.full([WARPS, 16, 64], 1.0, ITEM, LEFT), b, totals)
            bs += (b,)
        if portion + 1 < PORTIONS:
            coming = _inputs(x_pointers, portion + 1, WARPS, PAIRS, PARTS)
        if portion % PARTS == 0:
            async_copy.wait_group(STEPS - 1 - portion // PARTS)
        for block in gl.static_range(SIXTEENS):
            tile = _by_warp(tiles[portion // PARTS * SIXTEENS + block].load(W_TILE))
            sums = ys[block] if GROUPS == 1 and not CORRECTED else gl.zeros([WARPS, 16, ROWS], gl.float32, MMA)
            for i in gl.static_range(EACH):
                a = _in_mma_order(raw_numbers(tile, portion % PARTS * EACH + i, KIND, ITEM))
                sums = mma_v2(gl.convert_layout(a, LEFT, assert_trivial=True), bs[i], sums)
            if CORRECTED:
                if zero is not None:
                    of_block = found_zeros[portion // PARTS * SIXTEENS + block]
                    offset = offset_of_part(of_block, portion % PARTS, zero.dtype.element_ty, KIND, ITEM)
                    sums -= totals * gl.expand_dims(offset, 2)
                else:
                    sums -= totals * (136.0 if ITEM.is_bf16() else 1032.0)
            if GROUPS > 1:
                of_block = found_scales[portion // PARTS * SIXTEENS + block]
                factor = of_part(of_block, portion % PARTS, scale.dtype.element_ty).to(gl.float32)
                sums = ys[block] + sums * gl.expand_dims(factor, 2)
            elif CORRECTED:
                sums += ys[block]
            ys = _replaced(ys, block, sums)

    # a thread adds the sums of all warps for one output, gated for a gate row and the up row after it
    EVEN: gl.constexpr = 2 if GATED else 1
    DOWN: gl.constexpr = gl.BlockedLayout([WARPS, EVEN, 1], [1, 4, 8], [1, WARPS, 1], [0, 1, 2])
    for block in gl.static_range(SIXTEENS):
        y = gl.sum(gl.convert_layout(ys[block], DOWN), axis=0)  # [16, ROWS]
        rows = weight_rows(
            gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, DOWN))), first_n + block * WIDTH, N, GATED
        )
        if GROUPS == 1:
            y *= gl.expand_dims(gl.load(scale + rows).to(gl.float32), 1)
        if bias is not None:
            y += gl.expand_dims(gl.where(split == 0, gl.load(bias + rows).to(gl.float32), 0.0), 1)
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(y, [WIDTH, 2, ROWS]), [0, 2, 1]))
            y = gate / (1 + gl.exp(-gate)) * up
        _store(out, y, first_n + block * WIDTH, split, M, N)


def packed_at_once_serves(weight: PackedWords) -> bool:
    return (
        weight.kind in ("int4", "int8")
        and weight.distance == 64
        and weight.minimum is None
        and weight.scale_unit is None
    )


def packed_at_once_linear(
    x: Tensor,  # [M, K] bfloat16 or float16, M <= MAX_ROWS
    weight: PackedWords,  # [N, K]; gated: the gate rows, then the up rows
    bias: Tensor | None = None,  # [N]
    *,
    gated: bool = False,
    pdl: bool = False,
    tile: AtOnceTile | None = None,
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    m, num_weight_rows = x.shape[0], weight.shape[0]
    out = x.new_empty(m, num_weight_rows // 2 if gated else num_weight_rows)
    tile = tile or at_once_tile(num_weight_rows, x.shape[1], weight.bits, split=False)
    assert tile is not None
    _launch(x, weight, bias, out, tile, gated=gated, pdl=pdl)
    return out


def packed_at_once_split_k_linear(
    x: Tensor,  # [M, K] bfloat16 or float16, M <= MAX_ROWS
    weight: PackedWords,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    pdl: bool = False,
    tile: AtOnceTile | None = None,
) -> Tensor:  # [splits, M, N] float32
    (m, k), n = x.shape, weight.shape[0]
    tile = tile or at_once_tile(n, k, weight.bits, split=True)
    assert tile is not None
    out = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, tile, gated=False, pdl=pdl)
    return out


def _launch(
    x: Tensor, weight: PackedWords, bias: Tensor | None, out: Tensor, tile: AtOnceTile, *, gated: bool, pdl: bool
) -> None:
    (m, k), num_weight_rows = x.shape, weight.shape[0]
    assert packed_at_once_serves(weight) and m <= MAX_ROWS and weight.shape[1] == k and weight.words.is_contiguous()
    assert x.dtype != torch.float32 and x.stride(1) == 1 and x.stride(0) % 2 == 0 and tile.divides(k, weight.bits)
    launch(
        _packed_at_once_kernel,
        (cdiv(num_weight_rows, 16 * tile.sixteens), tile.splits),
        x,
        weight.words,
        weight.scale,
        weight.zero,
        bias,
        out,
        m,
        out.shape[-1],
        x.stride(0),
        K=k,
        KIND=weight.kind,
        PAIRS=weight.num_pairs,
        GROUPS=weight.scale.shape[-1],
        SPLITS=tile.splits,
        SIXTEENS=tile.sixteens,
        WARPS=tile.num_warps,
        GATED=gated,
        PDL=pdl,
        num_warps=tile.num_warps,
        pdl=pdl,
        maxnreg=tile.registers,
    )
