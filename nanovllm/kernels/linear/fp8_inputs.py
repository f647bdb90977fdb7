"""Products of fp8 weights with inputs rounded to fp8 (W8A8), for more rows than packed_rows.py serves.

Inputs get one scale per token, or one per token and group of columns where the weight has a scale per group. Their
codes are written in the order that the weight's words have (checkpoint/packed/words.py): the product does not depend on
the order of the columns, as long as both factors have the same. Sums of 128 columns are added in float32, because the
tensor cores add fp8 products with fewer bits. Up to 16 rows inputs are not rounded: reading the weight limits the speed
there, and the result is only closer to that of the unrounded model.
"""

import math

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
def _round_inputs_kernel(
    x,
    codes,
    scale,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DISTANCE: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and group."""
    m, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)  # in the order of words: byte 2 i + j of word c is column DISTANCE * j + 2 c + i
    within = place % (2 * DISTANCE)
    column = place - within + within % 2 * DISTANCE + within // 4 * 2 + within // 2 % 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + m * x_stride + group * GROUP + column, mask=place < GROUP, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=0)
    s = tl.where(largest == 0, 1.0, largest / LARGEST)
    value = tl.clamp(value / s, -LARGEST, LARGEST)
    if INTERPRETED:  # its conversion truncates some numbers: round them to fp8's steps before it
        power = tl.maximum((value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 2**-6)
        value = value + power * 1572864.0 - power * 1572864.0
    tl.store(codes + m * K + group * GROUP + place, value.to(codes.dtype.element_ty), mask=place < GROUP)
    tl.store(scale + m * (K // GROUP) + group, s)


def round_inputs(x: Tensor, groups: int, distance: int, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """[M, K] -> codes [M, K] in the order of words, and float32 scales [M, groups]."""
    m, k = x.shape
    group = k // groups
    assert x.stride(1) == 1 and k % groups == 0 and group % (2 * distance) == 0
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(m, groups, dtype=torch.float32, device=x.device)
    block = next_power_of_2(group)
    launch(
        _round_inputs_kernel,
        (m, groups),
        x,
        codes,
        scale,
        x.stride(0),
        K=k,
        GROUP=group,
        BLOCK=block,
        DISTANCE=distance,
        LARGEST=LARGEST,
        INTERPRETED=interpreted(_round_inputs_kernel),
        PDL=pdl,
        num_warps=min(8, max(1, block // 512)),
        pdl=pdl,
    )
    return codes, scale


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
            sums *= tl.load(x_scale + rows * GROUPS + group)[None, :]
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
