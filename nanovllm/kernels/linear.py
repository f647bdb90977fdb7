"""A linear layer for few rows: the weight streams by once, with norm, gate and residual folded in at either end.

y = norm(x) W^T + bias; gated: silu(gate) * up of it; then residual + y. The RMS norm costs no pass of its own:
norm(x) W^T = rstd * ((x * norm_weight) W^T), and x's sum of squares grows along the same loop over K.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 64


def fused_linear_reference(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    *,
    bias: Tensor | None = None,  # [N]
    norm_weight: Tensor | None = None,  # [K]
    eps: float = 0.0,
    residual: Tensor | None = None,  # [M, N], or [M, N / 2] if gated
    gated: bool = False,
) -> Tensor:
    y = x.float()
    if norm_weight is not None:
        y = F.rms_norm(y, y.shape[-1:], norm_weight.float(), eps)
    y = F.linear(y, weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = residual.float() + y
    return y.to(x.dtype)


@dataclass(frozen=True)
class LinearConfig:
    block_m: int  # rows of x a program takes; 1 = dot products without the tensor cores
    block_n: int  # rows of the weight a program reads
    block_k: int  # columns a step, of each slice
    slices: int  # parts of K side by side in a program, one a warp; 1 = the warps share one part
    splits: int  # parts of K in programs of their own
    num_warps: int
    num_stages: int

    @property
    def floats_per_program(self) -> int:
        """What a program leaves in the workspace: its partial tile and its rows' sums of squares."""
        return self.block_m * (self.block_n + 1)


def linear_config(m: int, n: int, k: int, *, gated: bool, dtype: torch.dtype, num_sms: int) -> LinearConfig:
    """Enough programs to fill the chip, enough bytes in flight a program, and no more copies of x than that needs."""
    if m == 1:
        return _gemv_config(n, k, num_sms)
    if dtype == torch.float32:
        return LinearConfig(16, 16, 32, slices=4, splits=1, num_warps=4, num_stages=2)
    if m <= 16:
        block_n, slices = (32, 4) if n >= 24 * num_sms else (16, 8)
        splits = _splits(n // block_n, k // (slices * 64), num_sms)
        return LinearConfig(16, block_n, 64, slices=slices, splits=splits, num_warps=slices, num_stages=4)
    if m <= 32:
        block_n = 32
        splits = _splits(n // block_n, k // 256, num_sms)
        return LinearConfig(32, block_n, 64, slices=4, splits=splits, num_warps=4, num_stages=4)
    if n >= 96 * num_sms:
        return LinearConfig(64, 128, 64, slices=1, splits=1, num_warps=4, num_stages=4)
    splits = _splits(n // 64, k // 128, num_sms)
    return LinearConfig(64, 64, 128, slices=1, splits=splits, num_warps=4, num_stages=4)


def _gemv_config(n: int, k: int, num_sms: int) -> LinearConfig:
    num_warps = 8 if k >= 4096 else 4 if k >= 1024 else 2
    block_n = 4 if n >= 4 * num_sms else 2
    return LinearConfig(1, block_n, 256 * num_warps, slices=1, splits=1, num_warps=num_warps, num_stages=1)


def _splits(tiles: int, steps: int, num_sms: int) -> int:
    """Into how many programs to part K: more of them until they fill most of the chip, each with two steps or more."""
    splits = 1
    while tiles * splits * 3 <= num_sms * 2 and steps >= splits * 4:
        splits *= 2
    return splits


class LinearWorkspace:
    """Scratch of the programs that share a tile of the output. Launches in one stream may share it."""

    def __init__(self, device: torch.device, num_programs: int = 1024, floats_per_program: int = 64 * 65) -> None:
        self.partials = torch.empty(num_programs * floats_per_program, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(num_programs, dtype=torch.int32, device=device)  # a launch leaves zeros behind

    def fits(self, config: LinearConfig, tiles: int) -> bool:
        num_floats = tiles * config.splits * config.floats_per_program
        return tiles <= len(self.arrivals) and num_floats <= len(self.partials)


@triton.jit
def _prefetch(pointers):
    """Asks for the cache lines without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _weight_rows(tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The weight's row of each column of a tile; those past the end read the last row."""
    column = tl.arange(0, BLOCK_N)
    if GATED:  # even columns are gates, odd ones their ups, so that one thread holds both
        pair = tl.minimum(tile * (BLOCK_N // 2) + column // 2, N // 2 - 1)
        return pair + column % 2 * (N // 2)
    return tl.minimum(tile * BLOCK_N + column, N - 1)


@triton.jit
def _finish(y, bias, residual, out, m, tile, rows, M, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Adds the bias to a tile of the product, gates it, adds the residual, stores it."""
    if bias is not None:
        y += tl.load(bias + rows).to(tl.float32)[None, :]
    num_columns = N
    width: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        num_columns = N // 2
        gate, up = tl.split(tl.reshape(y, (y.shape[0], width, 2)))
        y = gate * tl.sigmoid(gate) * up
    m = m[:, None]
    n = tile * width + tl.arange(0, width)[None, :]
    mask = (m < M) & (n < num_columns)
    if residual is not None:
        y += tl.load(residual + m * num_columns + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m * num_columns + n, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _columns(pointers, k, first: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """What lies BLOCK_K columns from `first` on; zeros past the end."""
    if first + BLOCK_K <= K:
        return tl.load(pointers + first)
    else:
        return tl.load(pointers + first, mask=first + k < K, other=0.0)


@triton.jit
def _one_row_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    AHEAD: tl.constexpr = min(STEPS, 4)  # tiles of the weight on their way before anything is known of x
    tile = tl.program_id(0)
    rows = _weight_rows(tile, N, BLOCK_N, GATED)
    k = tl.arange(0, BLOCK_K)
    w_pointers = weight + rows.to(tl.int64)[:, None] * K + k[None, :]

    ahead = ()  # type: tuple
    for step in tl.static_range(AHEAD):
        ahead += (_columns(w_pointers, k[None, :], step * BLOCK_K, K, BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        w = ahead[step] if step < AHEAD else _columns(w_pointers, k[None, :], step * BLOCK_K, K, BLOCK_K)
        a = _columns(x + k, k, step * BLOCK_K, K, BLOCK_K).to(tl.float32)
        if norm_weight is not None:
            squares += a * a
            a *= _columns(norm_weight + k, k, step * BLOCK_K, K, BLOCK_K).to(tl.float32)
        products += w.to(tl.float32) * a[None, :]
    y = tl.sum(products, axis=1)
    if norm_weight is not None:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    _finish(y[None, :], bias, residual, out, tl.arange(0, 1), tile, rows, 1, N, BLOCK_N, GATED)


@triton.jit
def _multiply_add(a, b, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """total + a b^T, slice by slice where there are slices."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    b = tl.permute(b, (0, 2, 1)) if len(b.shape) == 3 else tl.trans(b)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    partials,
    arrivals,
    M,
    N,
    K,
    x_stride,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    STEP: tl.constexpr = SLICES * BLOCK_K
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row_block = tl.program_id(2)
    rows = _weight_rows(tile, N, BLOCK_N, GATED)
    w_rows = weight + rows.to(tl.int64) * K
    i = tl.arange(0, BLOCK_M)
    m = row_block * BLOCK_M + i
    num_steps = tl.cdiv(tl.cdiv(K, STEP), SPLITS)
    begin = split * num_steps * STEP
    end = tl.minimum(begin + num_steps * STEP, K)

    if PDL:
        LINES: tl.constexpr = 32768 // BLOCK_N // 64
        line = begin + tl.arange(0, LINES) * (128 // (weight.dtype.element_ty.primitive_bitwidth // 8))
        _prefetch(w_rows[:, None] + tl.minimum(line, end - 1)[None, :])
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    # With slices every tile has a leading dimension, the slice, and a warp multiplies one: it then has K / SLICES
    # dependent steps instead of K. The slices of a step are neighbours in memory.
    if SLICES > 1:
        k = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
        w_pointers = w_rows[None, :, None] + k
        x_pointers = x + m[None, :, None] * x_stride + k
        x_mask = m[None, :, None] < M
        products = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
        squares = tl.zeros([SLICES, BLOCK_M, BLOCK_M], tl.float32)
    else:
        k = tl.arange(0, BLOCK_K)[None, :]
        w_pointers = w_rows[:, None] + k
        x_pointers = x + m[:, None] * x_stride + k
        x_mask = m[:, None] < M
        products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        squares = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)

    if norm_weight is not None and SLICES == 1:
        g = tl.load(norm_weight + begin + k, mask=begin + k < K, other=0.0)
    for first in tl.range(begin, end, STEP, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_pointers + first)
            a = tl.load(x_pointers + first, mask=x_mask, other=0.0)
        else:
            w = tl.load(w_pointers + first, mask=first + k < K, other=0.0)
            a = tl.load(x_pointers + first, mask=x_mask & (first + k < K), other=0.0)
        if norm_weight is not None:
            # The sums of squares are the diagonal of x x^T: no second layout of x, as a sum of x * x would need.
            squares = _multiply_add(a, a, squares, PRECISION, WIDEN)
            if SLICES > 1:
                g = tl.load(norm_weight + first + k, mask=first + k < K, other=0.0)
            a = (a.to(tl.float32) * g.to(tl.float32)).to(a.dtype)
            if SLICES == 1:  # too little a thread for the copies that bring w and x: by hand, a step ahead
                g = tl.load(norm_weight + first + STEP + k, mask=first + STEP + k < K, other=0.0)
        products = _multiply_add(a, w, products, PRECISION, WIDEN)

    if SLICES > 1:
        products = tl.sum(products, axis=0)
        squares = tl.sum(squares, axis=0)
    square_sum = tl.sum(tl.where(i[:, None] == i[None, :], squares, 0.0), axis=1)  # [BLOCK_M]; unused without a norm

    if SPLITS > 1:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        shared_tile = row_block * tl.num_programs(0) + tile
        tile_partials = partials + shared_tile * (SPLITS * (SIZE + BLOCK_M))
        own = tile_partials + split * (SIZE + BLOCK_M)
        place = i[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(own + place, products)
        if norm_weight is not None:
            tl.store(own + SIZE + i, square_sum)
        tl.debug_barrier()  # every thread's stores come before the one that counts them
        arrived = tl.atomic_add(arrivals + shared_tile, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        # The last to arrive adds up in a fixed order, itself included: the same bits whoever that is.
        products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        square_sum = tl.zeros([BLOCK_M], tl.float32)
        for other in range(SPLITS):
            products += tl.load(tile_partials + other * (SIZE + BLOCK_M) + place, cache_modifier=".cg")
            if norm_weight is not None:
                square_sum += tl.load(tile_partials + other * (SIZE + BLOCK_M) + SIZE + i, cache_modifier=".cg")
        tl.store(arrivals + shared_tile, 0)
    if norm_weight is not None:
        products *= tl.rsqrt(square_sum / K + eps)[:, None]
    _finish(products, bias, residual, out, m, tile, rows, M, N, BLOCK_N, GATED)


@lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def fused_linear(
    x: Tensor,  # [M, K], M <= MAX_ROWS
    weight: Tensor,  # [N, K]; gated: the gates' rows, then the ups'
    *,
    bias: Tensor | None = None,  # [N]
    norm_weight: Tensor | None = None,  # [K]; None = x is not normed
    eps: float = 0.0,
    residual: Tensor | None = None,  # [M, N], or [M, N / 2] if gated
    gated: bool = False,
    out: Tensor | None = None,  # defaults to the residual, in place, or to a new tensor
    workspace: LinearWorkspace | None = None,  # None = K is never split among programs
    config: LinearConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    m, k = x.shape
    n = weight.shape[0]
    assert m <= MAX_ROWS and weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    config = config or linear_config(m, n, k, gated=gated, dtype=x.dtype, num_sms=_num_sms(x.device))
    if out is None:
        out = residual if residual is not None else x.new_empty(m, n // 2 if gated else n)
    assert out.is_contiguous() and (residual is None or residual.is_contiguous())
    assert out.data_ptr() != x.data_ptr()  # other programs still read x when the first ones write
    tiles = triton.cdiv(n, config.block_n)
    launch_options = {"num_warps": config.num_warps, **({"launch_pdl": True} if pdl else {})}
    if config.block_m == 1:
        assert m == 1
        _one_row_kernel[(tiles,)](
            x,
            weight,
            bias,
            norm_weight,
            residual,
            out,
            n,
            eps,
            K=k,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GATED=gated,
            PDL=pdl,
            **launch_options,
        )
        return out
    row_blocks = triton.cdiv(m, config.block_m)
    if workspace is None or not workspace.fits(config, tiles * row_blocks):
        config = replace(config, splits=1)
    _few_rows_kernel[(tiles, config.splits, row_blocks)](
        x,
        weight,
        bias,
        norm_weight,
        residual,
        out,
        workspace.partials if workspace is not None and config.splits > 1 else None,
        workspace.arrivals if workspace is not None and config.splits > 1 else None,
        m,
        n,
        k,
        x.stride(0),
        eps,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SLICES=config.slices,
        SPLITS=config.splits,
        EVEN_K=k % (config.slices * config.block_k) == 0,
        GATED=gated,
        PDL=pdl,
        STAGES=config.num_stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        WIDEN=not isinstance(_few_rows_kernel, triton.JITFunction),  # the interpreter's dot does not know bfloat16
        **launch_options,
    )
    return out
