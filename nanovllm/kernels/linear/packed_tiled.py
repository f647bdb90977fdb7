"""A linear layer with a packed weight for tens to hundreds of rows, unpacked in registers for the tensor cores.

The weight is the left operand, W x^T: wgmma takes a left operand from registers, so that an unpacked tile is never
written to shared memory. `packed_tiled_linear` computes y = x W^T + bias, or silu(gate) * up of it in the same launch.
`packed_split_k_linear` is for weights with few rows: it divides K among up to four programs per tile and returns their
float32 partial sums, which `add_rms_norm` or `add_partial_sums` add to the residual. `packed_deterministic` has one
tile shape and one order of additions for any number of rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.one_row import weight_rows
from nanovllm.kernels.linear.packed import PackedWords, interpreted, loaded, numbers, scales, zeros_of
from nanovllm.kernels.linear.tiled import _device_limits, _silu_and_mul, num_sms
from nanovllm.kernels.select import ENOUGH_OUTPUTS, MANY_OUTPUTS

MAX_ROWS = 256
MAX_SPLITS = 4


@dataclass(frozen=True)
class PackedTile:
    block_m: int  # rows of x
    block_n: int  # rows of the weight
    num_warps: int = 4
    most_stages: int = 6


DETERMINISTIC = PackedTile(64, 64, most_stages=3)


def packed_tile(m: int, num_weight_rows: int, bits: int) -> PackedTile:
    """The fastest at 8, 64 and 256 rows of Qwen3-8B's linears on an H200, of those that bench/packed_kernels.py
    measures."""
    if m <= 32:
        return PackedTile(16 if m <= 16 else 32, 64)
    wide = PackedTile(64, 128, num_warps=8)
    if m > 64:
        return PackedTile(64, 64) if bits == 8 and num_weight_rows < ENOUGH_OUTPUTS else wide
    if num_weight_rows < ENOUGH_OUTPUTS:
        return wide
    return PackedTile(64 if num_weight_rows >= MANY_OUTPUTS else 32, 64)


@triton.jit
def _groups(
    scale, zero, minimum, scale_unit, minimum_unit, n, span, SPAN: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, SCALE_ROWS: tl.constexpr,
):  # fmt: skip
    """Scales, minima and zeros of a span of rows n, one tensor for each of its groups."""
    found_scales = ()  # type: tuple
    found_minima = ()  # type: tuple
    found_zeros = ()  # type: tuple
    for part in tl.static_range(max(1, SPAN // GROUP)):
        group = span * SPAN // GROUP + part
        if GROUPS > 1:
            found_scales += (scales(scale, scale_unit, n, group, None, GROUPS, UNITS, SCALE_ROWS),)
        if minimum is not None:
            found_minima += (scales(minimum, minimum_unit, n, group, None, GROUPS, UNITS, 1),)
        if zero is not None or KIND == "int4":
            found_zeros += (zeros_of(zero, minimum, n[:, None], group, None, GROUPS, KIND),)
    return found_scales, found_minima, found_zeros


@triton.jit
def add_span(
    y,  # [BLOCK_N, BLOCK_M]
    codes,  # [BLOCK_N, DISTANCE / 2]
    x_pointers,  # [BLOCK_M, DISTANCE], of the span's first pairs
    x_mask,  # None, or of the same shape
    found,  # of `_groups`
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr,
    PARTS: tl.constexpr,
    ONE_SCALE: tl.constexpr,  # rows have one scale, which is applied at the end
    DOT_TYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y + W x^T of a span's columns. `x_mask` False: the row counts as zeros."""
    ITEM: tl.constexpr = x_pointers.dtype.scalar.element_ty
    found_scales, found_minima, found_zeros = found
    for part in tl.static_range(PARTS):
        sums = y if ONE_SCALE else tl.zeros(y.shape, tl.float32)
        totals = tl.zeros(y.shape, tl.float32)
        for i in tl.static_range(PAIRS // PARTS):
            first = (part * (PAIRS // PARTS) + i) * DISTANCE
            a = tl.trans(loaded(x_pointers + first, x_mask).to(DOT_TYPE))
            zeros = found_zeros[part] if len(found_zeros) > 0 else None
            w = numbers(codes, zeros, part * (PAIRS // PARTS) + i, KIND, ITEM, INTERPRETED)
            sums = tl.dot(tl.reshape(w, (codes.shape[0], DISTANCE)), a, sums)
            if len(found_minima) > 0:
                totals = tl.dot(tl.full([codes.shape[0], DISTANCE], 1.0, DOT_TYPE), a, totals)
        if ONE_SCALE:
            y = sums
        else:
            y += sums * found_scales[part][:, None]
        if len(found_minima) > 0:
            y -= totals * found_minima[part][:, None]
    return y


@triton.jit(do_not_specialize=["M"])
def _packed_tiled_kernel(
    x,
    words,
    scale,
    zero,
    minimum,
    scale_unit,
    minimum_unit,
    bias,
    out,
    M,
    N,  # columns of `out`
    x_stride,
    K: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    DOT_TYPE: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty  # the interpreter's dot: no bfloat16
    SPAN: tl.constexpr = DISTANCE * PAIRS
    SPANS: tl.constexpr = K // SPAN
    GROUP: tl.constexpr = K // GROUPS
    PARTS: tl.constexpr = max(1, SPAN // GROUP)
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    split = tl.program_id(2)
    first_n = tl.program_id(1) * WIDTH
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    if GATED:  # one thread must hold a gate and its up, which are rows eight apart
        w_rows = tl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
    else:
        w_rows = weight_rows(j, first_n, N, False)
    w_pointers = words + w_rows.to(tl.int64)[:, None] * (K // (2 * PAIRS)) + tl.arange(0, DISTANCE // 2)[None, :]
    # indices past M wrap around: a mask costs time, and clamping would have many programs read the same row
    x_pointers = x + (m % M).to(tl.int64)[:, None] * x_stride + tl.arange(0, DISTANCE)[None, :]
    first, last = SPANS * split // SPLITS, SPANS * (split + 1) // SPLITS
    found = _groups(
        scale, zero, minimum, scale_unit, minimum_unit, w_rows, first, SPAN, GROUP, KIND, GROUPS, UNITS, SCALE_ROWS
    )
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for span in tl.range(first, last, num_stages=STAGES):
        codes = tl.load(w_pointers + span * (DISTANCE // 2))
        now = found
        # those of the next span: they are loaded while this one is multiplied
        found = _groups(
            scale, zero, minimum, scale_unit, minimum_unit, w_rows, tl.minimum(span + 1, SPANS - 1), SPAN, GROUP, KIND,
            GROUPS, UNITS, SCALE_ROWS,
        )  # fmt: skip
        y = add_span(
            y, codes, x_pointers + span * SPAN, None, now, KIND, PAIRS, DISTANCE, PARTS, GROUPS == 1, DOT_TYPE,
            INTERPRETED,
        )  # fmt: skip
    if GROUPS == 1:
        y *= scales(scale, scale_unit, w_rows, 0, None, GROUPS, UNITS, SCALE_ROWS)[:, None]
    if bias is not None:
        y += tl.where(split == 0, tl.load(bias + w_rows).to(tl.float32), 0.0)[:, None]
    if GATED:
        y = _silu_and_mul(y, BLOCK_M, WIDTH, True)
    n = first_n + tl.arange(0, WIDTH)[:, None]
    offset = (split * M + m[None, :]).to(tl.int64) * N + n
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=(m[None, :] < M) & (n < N))


def packed_tiled_linear(
    x: Tensor,  # [M, K] bfloat16 or float16
    weight: PackedWords,  # [N, K]; gated: the gate rows, then the up rows
    bias: Tensor | None = None,  # [N]
    *,
    gated: bool = False,
    pdl: bool = False,
    tile: PackedTile | None = None,
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    m, num_weight_rows = x.shape[0], weight.shape[0]
    out = x.new_empty(m, num_weight_rows // 2 if gated else num_weight_rows)
    _launch(x, weight, bias, out, tile or packed_tile(m, num_weight_rows, weight.bits), splits=1, gated=gated, pdl=pdl)
    return out


def packed_split_k_linear(
    x: Tensor,  # [M, K] bfloat16 or float16
    weight: PackedWords,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    pdl: bool = False,
    tile: PackedTile | None = None,
    splits: int | None = None,
) -> Tensor:  # [splits, M, N] float32
    m, n = x.shape[0], weight.shape[0]
    tile = tile or packed_tile(m, n, weight.bits)
    if splits is None:
        tiles, splits = cdiv(n, tile.block_n) * cdiv(m, tile.block_m), MAX_SPLITS
        while splits > 1 and 4 * tiles * splits > 5 * num_sms():
            splits //= 2
    splits = min(splits, weight.words.shape[-1] // (weight.distance // 2))
    out = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, tile, splits=splits, gated=False, pdl=pdl)
    return out


def packed_deterministic(x: Tensor, weight: PackedWords, bias: Tensor | None = None) -> Tensor:
    """A row's bits depend on that row and the weight alone."""
    return packed_tiled_linear(x, weight, bias, tile=DETERMINISTIC)


def _num_stages(tile: PackedTile, weight: PackedWords, num_steps: int, x_size: int) -> int:
    """As many pipeline stages as fit in shared memory, with room for two programs per SM."""
    span_bytes = tile.block_n * weight.distance * 2 + tile.block_m * weight.distance * weight.num_pairs * x_size
    return max(1, min(tile.most_stages, num_steps, (_device_limits()[1] // 2 - 1024) // span_bytes))


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
    (m, k), num_weight_rows = x.shape, weight.shape[0]
    assert weight.shape[1] == k and x.stride(1) == 1 and x.dtype != torch.float32
    num_spans = k // (weight.distance * weight.num_pairs)
    launch(
        _packed_tiled_kernel,
        (cdiv(m, tile.block_m), cdiv(num_weight_rows, tile.block_n), splits),
        x,
        *weight.pointers,
        bias,
        out,
        m,
        out.shape[-1],
        x.stride(0),
        K=k,
        **weight.constants,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=_num_stages(tile, weight, cdiv(num_spans, splits), x.element_size()),
        GATED=gated,
        INTERPRETED=interpreted(_packed_tiled_kernel),
        PDL=pdl,
        num_warps=tile.num_warps,
        pdl=pdl,
    )
