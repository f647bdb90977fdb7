"""Products of fp8 weights with inputs rounded to fp8 (W8A8): the rounding, which the kernels for Hopper use too, and a
product for other GPUs and more rows than packed_rows.py serves.

Inputs get one scale per token, or one per token and group of columns where the weight has a scale per group. Their
codes are written in the order that the weight's words have (checkpoint/packed/words.py): the product does not depend on
the order of the columns, as long as both factors have the same. Sums of 128 columns are added in float32, because the
tensor cores add fp8 products with fewer bits.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2
from nanovllm.kernels.linear.packed import PackedWords, interpreted, scales
from nanovllm.kernels.linear.packed_tiled import MAX_SPLITS, PackedTile
from nanovllm.kernels.linear.tiled import _device_limits, _silu_and_mul, num_sms
from nanovllm.kernels.select import ENOUGH_OUTPUTS

MIN_DISTANCE = 64
LARGEST = 448.0
COLUMNS_A_PROGRAM = 4096  # that are rounded together, at least one group
PADDING = 256  # rows of the largest tile
# per warp, up to so many rows: with a norm; without, for at most COLUMNS_A_PROGRAM columns; for more
PAIRS_A_WARP = ((32, 64, 64, 64), (64, 64, 512, 256), (192, 64, 256, 512), (256, 128, 128, 512))


def fp8_tile(m: int, num_weight_rows: int) -> PackedTile:
    """The fastest at 64 and 256 rows of Qwen3-8B's linears on an H200, of those that bench/packed_kernels.py
    measures."""
    if m <= 32:
        return PackedTile(16 if m <= 16 else 32, 64)
    if m <= 64:
        return PackedTile(64, 64) if num_weight_rows >= ENOUGH_OUTPUTS else PackedTile(64, 128, num_warps=8)
    return PackedTile(64, 128) if m <= 128 else PackedTile(128, 64)


def round_inputs_reference(x: Tensor, groups: int) -> Tensor:
    """[M, K] with one scale per row and group, rounded and multiplied with the scale again, in float32."""
    grouped = x.float().unflatten(1, (groups, -1))
    largest = grouped.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / LARGEST)
    return ((grouped / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


@triton.jit
def _code(value, LARGEST: tl.constexpr):
    """The bits of e4m3 numbers in uint16, for the interpreter. Its conversion truncates some numbers: round them to
    fp8's steps before it."""
    value = tl.clamp(value, -LARGEST, LARGEST)
    power = tl.maximum((value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 2**-6)
    value = value + power * 1572864.0 - power * 1572864.0
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint16)


@triton.jit
def _pair(first, second, LARGEST: tl.constexpr, INTERPRETED: tl.constexpr):
    """Two numbers as e4m3 in the lower and the upper byte of uint16.

    One instruction converts both. (Converted apart and put together with shifts, ptxas 12.8 gave wrong bytes.)
    """
    if INTERPRETED:
        return _code(first, LARGEST) | (_code(second, LARGEST) << 8)
    else:
        ASM: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(ASM, "=h,f,f", [first, second], dtype=tl.uint16, is_pure=True, pack=1)


@triton.jit
def _with_sums(x, value, partial_sums, column, inside, stride, SPLITS: tl.constexpr):
    """Add SPLITS partial sums to inputs, in memory too."""
    for split in tl.static_range(SPLITS):
        value += tl.load(partial_sums + split * stride + column, mask=inside, other=0.0)
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + column, rounded, mask=inside)
    return rounded.to(tl.float32)


@triton.jit
def _sum_and_max(sum_1, max_1, sum_2, max_2):
    return sum_1 + sum_2, tl.maximum(max_1, max_2)


@triton.jit(do_not_specialize=["M"])
def _round_inputs_kernel(
    x,
    partial_sums,
    norm_weight,
    codes,  # in pairs
    scale,
    M,
    x_stride,
    scale_stride,
    eps,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM: tl.constexpr,  # groups per program; with a norm, all
    HALF: tl.constexpr,  # columns of half a group, rounded up to a power of two
    DISTANCE: tl.constexpr,
    SPLITS: tl.constexpr,  # of partial sums; 0 = there are none
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program rounds NUM groups of a row, or of its norm. In the order of words, columns that are DISTANCE apart are
    neighbours. Codes of rows from M on are zero."""
    m = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * NUM + tl.arange(0, NUM)
    i = tl.arange(0, HALF)
    stored = (group < K // GROUP)[:, None] & (i < GROUP // 2)[None, :]
    inside = (group < tl.where(m < M, K // GROUP, 0))[:, None] & (i < GROUP // 2)[None, :]
    column = group[:, None] * GROUP + (i // DISTANCE * (2 * DISTANCE) + i % DISTANCE)[None, :]
    if norm_weight is not None:
        first_weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        second_weight = tl.load(norm_weight + column + DISTANCE, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = x + m * x_stride
    first = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + column + DISTANCE, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        sums = partial_sums + m * K
        first = _with_sums(row, first, sums, column, inside, M * K, SPLITS)
        second = _with_sums(row, second, sums, column + DISTANCE, inside, M * K, SPLITS)
    if norm_weight is not None:
        # one reduction gives the sum of squares and the largest product with the weight
        squares = first * first + second * second
        first *= first_weight
        second *= second_weight
        total, largest = tl.reduce((squares, tl.maximum(tl.abs(first), tl.abs(second))), 1, _sum_and_max)
        rstd = tl.rsqrt(tl.sum(total, axis=0) / K + eps)
        first = (first * rstd).to(x.dtype.element_ty).to(tl.float32)
        second = (second * rstd).to(x.dtype.element_ty).to(tl.float32)
        largest = (largest * rstd).to(x.dtype.element_ty).to(tl.float32)
    else:
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
    s = tl.where(largest == 0, 1.0, largest / LARGEST)
    pair = _pair(first / s[:, None], second / s[:, None], LARGEST, INTERPRETED)
    tl.store(codes + m * (K // 2) + (group[:, None] * (GROUP // 2) + i[None, :]), pair, mask=stored)
    tl.store(scale + group * scale_stride + m, s, mask=group < K // GROUP)


def _num_warps(m: int, pairs: int, *, normed: bool) -> int:
    """For a program that rounds so many pairs: the fastest at 1 to 256 rows of Qwen3-8B in a chain of layers, and at
    16,896 rows, on an H200. Few programs are the faster the more loads each has on their way; from 33 rows on those
    without a norm find room beside the preceding attention if they are small."""
    for most_rows, normed_pairs, small_pairs, large_pairs in PAIRS_A_WARP:
        if m <= most_rows:
            pairs_a_warp = normed_pairs if normed else small_pairs if pairs <= COLUMNS_A_PROGRAM // 2 else large_pairs
            return max(1, min(pairs // pairs_a_warp, 32))
    return min(max(1, pairs // 256), 32) if normed else min(max(1, pairs // 64), 8)


class RoundedInputs(NamedTuple):
    codes: Tensor  # [M, K] fp8, in the order of words; maybe more rows, of zeros
    # [groups, M] float32; the memory goes on for PADDING numbers after each group, which kernels may read for rows past
    # the last
    scale: Tensor


def round_inputs(
    x: Tensor,  # [M, K]
    groups: int,  # of columns: each has a scale
    distance: int,  # of the weight's words
    *,
    rows: int | None = None,  # of the codes, if more than M
    norm_weight: Tensor | None = None,  # [K]: the RMS norm of x is rounded
    eps: float = 0.0,
    partial_sums: Tensor | None = None,  # [splits, M, K], float32 or of x's type: added to x in place, before the norm
    pdl: bool = False,
) -> RoundedInputs:
    m, k = x.shape
    group = k // groups
    assert x.stride(1) == 1 and k % groups == 0 and group % (2 * distance) == 0
    assert partial_sums is None or (norm_weight is not None and partial_sums.shape[1:] == x.shape)
    codes = torch.empty(rows or m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(groups, cdiv(m + PADDING, 16) * 16, dtype=torch.float32, device=x.device)[:, :m]
    half = next_power_of_2(group // 2)
    num = next_power_of_2(groups)
    if norm_weight is None:
        num = min(num, max(1, COLUMNS_A_PROGRAM // (2 * half)))
    launch(
        _round_inputs_kernel,
        (codes.shape[0], cdiv(groups, num)),
        x,
        partial_sums,
        norm_weight,
        codes.view(torch.uint16),
        scale,
        m,
        x.stride(0),
        scale.stride(0),
        eps,
        K=k,
        GROUP=group,
        NUM=num,
        HALF=half,
        DISTANCE=distance,
        SPLITS=0 if partial_sums is None else partial_sums.shape[0],
        LARGEST=LARGEST,
        INTERPRETED=interpreted(_round_inputs_kernel),
        PDL=pdl,
        num_warps=_num_warps(m, num * half, normed=norm_weight is not None),
        pdl=pdl,
    )
    return RoundedInputs(codes, scale)


def scaled_mm_linear(x: Tensor, weight: PackedWords, **norm: Any) -> Tensor:
    """x [M, K] bfloat16 and a weight with a scale per row -> [M, N], by torch's own kernels, which add sums of 128
    columns in float32 as ours do. `norm`: before the product, see `round_inputs`."""
    codes, scale = round_inputs(x, 1, weight.distance, **norm)
    right = weight.words.view(torch.float8_e4m3fn).t()
    return torch._scaled_mm(codes, right, scale_a=scale[0, :, None], scale_b=weight.scale.t(), out_dtype=x.dtype)


@triton.jit(do_not_specialize=["M"])
def _fp8_kernel(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    M,
    N,  # columns of `out`
    x_scale_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """W x^T, as in packed_tiled.py: few rows of x would not fill the left operand."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: tl.constexpr = K // BLOCK_K
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    split = tl.program_id(2)
    first_n = tl.program_id(1) * WIDTH
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    if GATED:  # one thread must hold a gate and its up, which are rows eight apart
        w_rows = tl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
    else:
        w_rows = tl.minimum(first_n + j, N - 1)
    k = tl.arange(0, BLOCK_K)[None, :]
    rows = m % M  # indices past M wrap around
    w_pointers = weight + w_rows.to(tl.int64)[:, None] * K + k
    x_pointers = x + rows.to(tl.int64)[:, None] * K + k
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in tl.range(STEPS * split // SPLITS, STEPS * (split + 1) // SPLITS, num_stages=STAGES):
        w, a = tl.load(w_pointers + step * BLOCK_K), tl.load(x_pointers + step * BLOCK_K)
        if INTERPRETED:
            w, a = w.to(tl.float32), a.to(tl.float32)
        sums = tl.dot(w, tl.trans(a))
        if GROUPS > 1:
            group = step * BLOCK_K // (K // GROUPS)
            sums *= tl.load(scale + w_rows // SCALE_ROWS * GROUPS + group)[:, None]
            sums *= tl.load(x_scale + group * x_scale_stride + rows)[None, :]
        y += sums
    if GROUPS == 1:
        y *= scales(scale, None, w_rows, 0, None, 1, 1, SCALE_ROWS)[:, None] * tl.load(x_scale + rows)[None, :]
    if bias is not None:
        y += tl.where(split == 0, tl.load(bias + w_rows).to(tl.float32), 0.0)[:, None]
    if GATED:
        y = _silu_and_mul(y, BLOCK_M, WIDTH, True)
    n = first_n + tl.arange(0, WIDTH)[:, None]
    offset = (split * M + m[None, :]).to(tl.int64) * N + n
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=(m[None, :] < M) & (n < N))


def fp8_linear(
    x: Tensor,  # [M, K]
    weight: PackedWords,  # [N, K] fp8; gated: the gate rows, then the up rows
    bias: Tensor | None = None,  # [N]
    *,
    gated: bool = False,
    pdl: bool = False,
    tile: PackedTile | None = None,
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    out = x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])
    _launch(x, weight, bias, out, tile or fp8_tile(x.shape[0], weight.shape[0]), splits=1, gated=gated, pdl=pdl)
    return out


def fp8_split_k_linear(
    x: Tensor,  # [M, K]
    weight: PackedWords,  # [N, K] fp8
    bias: Tensor | None = None,  # [N]
    *,
    pdl: bool = False,
    tile: PackedTile | None = None,
) -> Tensor:  # [splits, M, N] float32
    (m, k), n = x.shape, weight.shape[0]
    tile = tile or fp8_tile(m, n)
    tiles, splits = cdiv(n, tile.block_n) * cdiv(m, tile.block_m), MAX_SPLITS
    while splits > 1 and (4 * tiles * splits > 5 * num_sms() or splits * 128 > k):
        splits //= 2
    out = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, tile, splits=splits, gated=False, pdl=pdl)
    return out


def _launch(
    x: Tensor,
    weight: PackedWords,
    bias: Tensor | None,
    out: Tensor,
    tile: PackedTile,
    *,
    splits: int,
    gated: bool,
    pdl: bool,
) -> None:
    (m, k), groups = x.shape, weight.scale.shape[-1]
    assert weight.kind == "fp8" and weight.shape[1] == k and weight.distance >= MIN_DISTANCE
    codes, x_scale = round_inputs(x, groups, weight.distance, pdl=pdl)
    block_k = math.gcd(k // groups, 128)
    stage_bytes = (tile.block_m + tile.block_n) * block_k
    launch(
        _fp8_kernel,
        (cdiv(m, tile.block_m), cdiv(weight.shape[0], tile.block_n), splits),
        codes,
        x_scale,
        weight.words.view(torch.float8_e4m3fn),
        weight.scale,
        bias,
        out,
        m,
        out.shape[-1],
        x_scale.stride(0),
        K=k,
        GROUPS=groups,
        SCALE_ROWS=weight.scale_rows,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        STAGES=max(1, min(tile.most_stages, k // block_k // splits, (_device_limits()[1] // 2 - 1024) // stage_bytes)),
        GATED=gated,
        INTERPRETED=interpreted(_fp8_kernel),
        PDL=pdl,
        num_warps=tile.num_warps,
        pdl=pdl,
    )
