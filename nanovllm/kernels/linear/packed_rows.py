"""A linear layer with a packed weight for 1 to 16 rows, fused with the norm before it, the gate or residual after it.

y = norm(x) W^T + bias; if gated, y = silu(gate) * up; then residual + y. Reading the weight limits the speed, and next
to it the instructions that unpack it. So the words go from memory straight into registers, with several loads of 16
bytes per thread on their way, become the left operand of the tensor cores there (see fragments.py), and x is the right
one, whose eight or sixteen columns are its rows. The warps of a program divide K and their sums are added in a fixed
order. The norm takes no extra pass: norm(x) W^T = rstd * ((x * norm_weight) W^T), and the sums of squares are the
diagonal of x x^T.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.few_rows import _replaced
from nanovllm.kernels.linear.fragments import halves, in_mma_order, operand, rows_of, word, words_of
from nanovllm.kernels.linear.one_row import weight_rows
from nanovllm.kernels.linear.packed import PackedWords, interpreted, numbers, scales, times2, zeros_of
from nanovllm.kernels.select import ENOUGH_OUTPUTS

MAX_ROWS = 16
MIN_DISTANCE = 32  # a thread's words must belong to one group
LONG_INPUTS = 8192


@dataclass(frozen=True)
class RowTile:
    sixteens: int  # blocks of sixteen rows of the weight per program, which read the same x
    num_warps: int  # the warps of a program divide the columns
    num_ahead: int  # spans per warp that are loaded ahead


def row_tile(m: int, num_weight_rows: int, k: int, bits: int, groups: int) -> RowTile:
    """The fastest at 1 and 8 rows of Qwen3-8B's linears on an H200, of those that bench/packed_kernels.py measures.

    `groups`: of columns that have a scale. With one the sums of a row are one long chain of additions, and the engine
    was faster with few rows and many loads ahead.
    """
    if groups == 1:
        num_warps = 8 if k > LONG_INPUTS else 4
        return RowTile(1, num_warps, 4) if m <= 2 else RowTile(2, num_warps, 2)
    if num_weight_rows >= ENOUGH_OUTPUTS:
        return RowTile(2, 4, 2 if bits == 4 else 1)
    if bits == 8:
        return RowTile(1, 4, 4)
    if k > LONG_INPUTS:
        return RowTile(1 if m <= 2 else 2, 8, 2)
    return RowTile(1, 4, 4) if m <= 2 else RowTile(1, 8, 2)


@triton.jit
def _span(
    words,
    scale,
    zero,
    minimum,
    scale_unit,
    minimum_unit,
    first_n,
    N,
    GATED: tl.constexpr,
    step: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
):
    """Load one span per warp of sixteen rows: words, scales, minima and zeros, the last three as tuples with one tensor
    per group. More rows at once would have as many scales as threads, and Triton (3.6) loads only fewer directly in the
    layout that multiplies them with sums."""
    SPAN: tl.constexpr = DISTANCE * PAIRS
    SPANS: tl.constexpr = K // SPAN
    GROUP: tl.constexpr = K // GROUPS
    PARTS: tl.constexpr = max(1, SPAN // GROUP)  # groups of a span
    n = weight_rows(tl.arange(0, 16), first_n, N, GATED)[None, :]
    w_rows = weight_rows(rows_of(2), first_n, N, GATED)
    w_pointers = words + w_rows.to(tl.int64) * (K // (2 * PAIRS)) + words_of(WARPS, DISTANCE // 32)
    span = step * WARPS + tl.arange(0, WARPS)[:, None]
    span_of_words = step * WARPS + tl.reshape(tl.arange(0, WARPS), (1, 1, WARPS, 1, 1, 1))
    if (step + 1) * WARPS <= SPANS:
        inside, words_inside = None, None
        codes = tl.load(w_pointers + step * (WARPS * DISTANCE // 2))
    else:
        inside, words_inside = span < SPANS, span_of_words < SPANS
        codes = tl.load(w_pointers + step * (WARPS * DISTANCE // 2), mask=words_inside, other=0)
    found_scales = ()  # type: tuple
    found_minima = ()  # type: tuple
    found_zeros = ()  # type: tuple
    for part in tl.static_range(PARTS):
        group = span * SPAN // GROUP + part
        if GROUPS > 1:
            found_scales += (scales(scale, scale_unit, n, group, inside, GROUPS, UNITS, SCALE_ROWS),)
        if minimum is not None:
            found_minima += (scales(minimum, minimum_unit, n, group, inside, GROUPS, UNITS, 1),)
        if zero is not None or KIND == "int4":
            group = span_of_words * SPAN // GROUP + part
            found_zeros += (zeros_of(zero, minimum, w_rows, group, words_inside, GROUPS, KIND),)
    return codes, found_scales, found_minima, found_zeros


@triton.jit(do_not_specialize=["M"])
def _packed_rows_kernel(
    x,
    words,
    scale,
    zero,
    minimum,
    scale_unit,
    minimum_unit,
    bias,
    norm_weight,
    residual,
    out,
    M,
    N,  # columns of `out`
    x_stride,
    eps,
    K: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    EIGHTS: tl.constexpr,  # blocks of eight rows of x
    SIXTEENS: tl.constexpr,  # blocks of sixteen rows of the weight
    WARPS: tl.constexpr,
    MOST_AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    ITEM: tl.constexpr = x.dtype.element_ty
    DOT_TYPE: tl.constexpr = tl.float32 if INTERPRETED else ITEM  # the interpreter's dot does not support bfloat16
    SPANS: tl.constexpr = K // (DISTANCE * PAIRS)
    STEPS: tl.constexpr = (SPANS + WARPS - 1) // WARPS
    AHEAD: tl.constexpr = min(STEPS, MOST_AHEAD)
    PARTS: tl.constexpr = max(1, DISTANCE * PAIRS * GROUPS // K)  # groups of a span
    PAIRS_OF_GROUP: tl.constexpr = PAIRS // PARTS
    ROWS: tl.constexpr = 8 * EIGHTS
    WIDTH: tl.constexpr = 8 if GATED else 16
    first_n = tl.program_id(0) * (SIXTEENS * WIDTH)
    row = rows_of(EIGHTS)
    warp = tl.reshape(tl.arange(0, WARPS), (1, 1, WARPS, 1, 1, 1))
    # of a span's first pairs, in words of two items
    x_k = words_of(WARPS, DISTANCE // 32) + warp * ((PAIRS - 1) * DISTANCE // 2)
    x_pointers = x.to(tl.pointer_type(tl.int32)) + row * (x_stride // 2) + x_k

    ahead = ()  # type: tuple
    for i in tl.static_range(AHEAD * SIXTEENS):
        ahead += (
            _span(
                words, scale, zero, minimum, scale_unit, minimum_unit, first_n + i % SIXTEENS * WIDTH, N, GATED,
                i // SIXTEENS, K, WARPS, KIND, PAIRS, DISTANCE, GROUPS, UNITS, SCALE_ROWS,
            ),
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    ys = ()  # type: tuple
    for _ in tl.static_range(SIXTEENS):
        ys += (tl.zeros([WARPS, 16, ROWS], tl.float32),)
    squares = tl.zeros([WARPS, 16, ROWS], tl.float32)
    for step in tl.static_range(STEPS):
        inside = row < M
        if (step + 1) * WARPS > SPANS:
            inside = inside & (step * WARPS + warp < SPANS)
        for part in tl.static_range(PARTS):
            bs = ()  # type: tuple
            for i in tl.static_range(PAIRS_OF_GROUP):
                first = (step * WARPS * PAIRS + part * PAIRS_OF_GROUP + i) * (DISTANCE // 2)
                a = tl.load(x_pointers + first, mask=inside, other=0)
                if norm_weight is not None:
                    gain_pointers = norm_weight.to(tl.pointer_type(tl.int32)) + first + tl.broadcast_to(x_k, a.shape)
                    gain = tl.load(gain_pointers, mask=inside, other=0)
                    squares = _add_squares(squares, a, EIGHTS, ITEM, DOT_TYPE, INTERPRETED)
                    a = _product(a, gain, ITEM, INTERPRETED)
                bs += (tl.permute(operand(a, ITEM, DOT_TYPE, INTERPRETED), (0, 2, 1)),)
            for block in tl.static_range(SIXTEENS):
                codes, span_scales, span_minima, span_zeros = ahead[step % AHEAD * SIXTEENS + block]
                zeros = span_zeros[part] if len(span_zeros) > 0 else None
                sums = ys[block] if GROUPS == 1 else tl.zeros([WARPS, 16, ROWS], tl.float32)
                totals = tl.zeros([WARPS, 16, ROWS], tl.float32)
                for i in tl.static_range(PAIRS_OF_GROUP):
                    w = in_mma_order(numbers(codes, zeros, part * PAIRS_OF_GROUP + i, KIND, ITEM, INTERPRETED))
                    sums = tl.dot(w, bs[i], sums)
                    if minimum is not None:
                        totals = tl.dot(tl.full([WARPS, 16, DISTANCE], 1.0, DOT_TYPE), bs[i], totals)
                if GROUPS > 1:
                    sums = ys[block] + sums * span_scales[part][:, :, None]
                if minimum is not None:
                    sums -= totals * span_minima[part][:, :, None]
                ys = _replaced(ys, block, sums)
        if step + AHEAD < STEPS:
            for block in tl.static_range(SIXTEENS):
                later = _span(
                    words, scale, zero, minimum, scale_unit, minimum_unit, first_n + block * WIDTH, N, GATED,
                    step + AHEAD, K, WARPS, KIND, PAIRS, DISTANCE, GROUPS, UNITS, SCALE_ROWS,
                )  # fmt: skip
                ahead = _replaced(ahead, step % AHEAD * SIXTEENS + block, later)

    if norm_weight is not None:
        diagonal = tl.arange(0, 16)[None, :, None] == tl.arange(0, ROWS)[None, None, :]
        length = tl.sum(tl.sum(tl.where(diagonal, squares, 0.0), axis=1), axis=0)
        rstd = tl.rsqrt(length / K + eps)[None, :]
    for block in tl.static_range(SIXTEENS):
        y = tl.sum(ys[block], axis=0)  # [16, ROWS]
        n = weight_rows(tl.arange(0, 16), first_n + block * WIDTH, N, GATED)[:, None]
        if norm_weight is not None:
            y *= rstd
        if GROUPS == 1:
            y *= scales(scale, scale_unit, n, 0, None, GROUPS, UNITS, SCALE_ROWS)
        if bias is not None:
            y += tl.load(bias + n).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(y, (WIDTH, 2, ROWS)), (0, 2, 1)))
            y = gate * tl.sigmoid(gate) * up
        out_m = tl.arange(0, ROWS)[None, :]
        out_n = first_n + block * WIDTH + tl.arange(0, WIDTH)[:, None]
        mask = (out_m < M) & (out_n < N)
        offset = out_m * N + out_n
        if residual is not None:
            y += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_squares(
    squares, a, EIGHTS: tl.constexpr, ITEM: tl.constexpr, DOT_TYPE: tl.constexpr, INTERPRETED: tl.constexpr
):
    """x x^T of the columns in `a`, added to [WARPS, 16, rows]."""
    right = tl.permute(operand(a, ITEM, DOT_TYPE, INTERPRETED), (0, 2, 1))
    if EIGHTS == 1:  # mma takes sixteen rows on the left: the same eight twice
        a = tl.broadcast_to(a, (4, 8, a.shape[2], 2, a.shape[4], 4))
    return tl.dot(operand(a, ITEM, DOT_TYPE, INTERPRETED), right, squares)


@triton.jit
def _product(a, b, ITEM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Of the two items in each word."""
    if INTERPRETED:
        low, high = halves(a, ITEM, True)
        low_b, high_b = halves(b, ITEM, True)
        return word((low.to(tl.float32) * low_b).to(ITEM), (high.to(tl.float32) * high_b).to(ITEM))
    else:
        return times2(a, b, ITEM)


def packed_rows_linear(
    x: Tensor,  # [M, K] bfloat16 or float16, M <= MAX_ROWS
    weight: PackedWords,  # [N, K]; gated: the gate rows, then the up rows
    *,
    bias: Tensor | None = None,  # [N]
    norm_weight: Tensor | None = None,  # [K]; None: no norm
    eps: float = 0.0,
    residual: Tensor | None = None,  # [M, N], or [M, N / 2] if gated; updated in place and returned
    gated: bool = False,
    pdl: bool = False,
    tile: RowTile | None = None,
) -> Tensor:
    (m, k), (num_weight_rows, _) = x.shape, weight.shape
    n = num_weight_rows // 2 if gated else num_weight_rows
    assert m <= MAX_ROWS and weight.shape[1] == k and weight.distance >= MIN_DISTANCE
    assert x.dtype != torch.float32 and x.stride(1) == 1 and x.stride(0) % 2 == 0
    out = residual if residual is not None else x.new_empty(m, n)
    assert out.shape == (m, n) and out.is_contiguous()
    assert out.data_ptr() != x.data_ptr()  # some programs still read x when others write
    tile = tile or row_tile(m, num_weight_rows, k, weight.bits, weight.scale.shape[-1])
    launch(
        _packed_rows_kernel,
        (cdiv(num_weight_rows, 16 * tile.sixteens),),
        x,
        *weight.pointers,
        bias,
        norm_weight,
        residual,
        out,
        m,
        n,
        x.stride(0),
        eps,
        K=k,
        **weight.constants,
        EIGHTS=1 if m <= 8 else 2,
        SIXTEENS=tile.sixteens,
        WARPS=tile.num_warps,
        MOST_AHEAD=tile.num_ahead,
        GATED=gated,
        INTERPRETED=interpreted(_packed_rows_kernel),
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=1,  # the kernel loads ahead by itself
        pdl=pdl,
    )
    return out
