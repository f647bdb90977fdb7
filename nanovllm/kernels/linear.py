"""A linear layer for few rows: the weight streams by once, with norm, gate and residual folded in at either end.

y = norm(x) W^T + bias; gated: silu(gate) * up of it; then residual + y. The RMS norm costs no pass of its own:
norm(x) W^T = rstd * ((x * norm_weight) W^T), and x's sum of squares grows along the same loop over K.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels import launch

MAX_ROWS = 16  # beyond, cuBLAS and kernels of their own for norm and gate are faster

LAUNCH_EARLY = True  # under PDL the next kernel may start at the top of the sliced one, else behind its products


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
    block_k: int  # columns a step, of each slice; a step of all K has its weights fetched before x is known
    slices: int  # parts of K side by side in a program, one a warp
    num_warps: int
    num_stages: int


def linear_config(m: int, n: int, k: int, *, dtype: torch.dtype, num_sms: int) -> LinearConfig:
    """About a program for each multiprocessor, for a wide weight several, with many bytes in flight each."""
    if m == 1:
        return _gemv_config(n, k, num_sms)
    if dtype == torch.float32:
        return LinearConfig(16, 16, 32, slices=4, num_warps=4, num_stages=2)
    if n < 12 * num_sms:
        return LinearConfig(16, 8, 64, slices=8, num_warps=8, num_stages=4)
    if n < 24 * num_sms:
        return LinearConfig(16, 16, 64, slices=4, num_warps=4, num_stages=5)
    return LinearConfig(16, 32, 64, slices=4, num_warps=4, num_stages=6)


def _gemv_config(n: int, k: int, num_sms: int) -> LinearConfig:
    num_warps = 8 if k >= 4096 else 4 if k >= 1024 else 2
    block_n = 4 if n >= 4 * num_sms else 2
    return LinearConfig(1, block_n, 256 * num_warps, slices=1, num_warps=num_warps, num_stages=1)


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
    """total + a b^T, slice by slice."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, tl.permute(b, (0, 2, 1)), total, input_precision=PRECISION)


@triton.jit
def _step(pointers, k, first, row_mask, K, EVEN_K: tl.constexpr):
    """What lies a step from column `first` on, of the rows in the mask; zeros elsewhere."""
    if EVEN_K:
        if row_mask is None:
            return tl.load(pointers + first)
        else:
            return tl.load(pointers + first, mask=row_mask, other=0.0)
    else:
        mask = first + k < K
        if row_mask is not None:
            mask = mask & row_mask
        return tl.load(pointers + first, mask=mask, other=0.0)


@triton.jit
def _add_step(a, w, g, products, squares, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    if g is not None:
        # The sums of squares are the diagonal of x x^T: no second layout of x, as a sum of x * x would need.
        squares = _multiply_add(a, a, squares, PRECISION, WIDEN)
        a = (a.to(tl.float32) * g.to(tl.float32)).to(a.dtype)
    return _multiply_add(a, w, products, PRECISION, WIDEN), squares


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    M,
    N,
    K,
    x_stride,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    ONE_STEP: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # Every tile has a leading dimension, the slice, and a warp multiplies one: it then has K / SLICES dependent steps
    # instead of K. The slices of a step are neighbours in memory.
    STEP: tl.constexpr = SLICES * BLOCK_K
    tile = tl.program_id(0)
    rows = _weight_rows(tile, N, BLOCK_N, GATED)
    m = tl.arange(0, BLOCK_M)
    x_mask = m[None, :, None] < M
    k = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    w_pointers = weight + rows.to(tl.int64)[None, :, None] * K + k
    x_pointers = x + m[None, :, None] * x_stride + k

    products = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([SLICES, BLOCK_M, BLOCK_M], tl.float32)
    if PDL and LAUNCH_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if ONE_STEP:
        w = _step(w_pointers, k, 0, None, K, EVEN_K)
        g = None if norm_weight is None else _step(norm_weight + k, k, 0, None, K, EVEN_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if ONE_STEP:
        a = _step(x_pointers, k, 0, x_mask, K, EVEN_K)
        products, squares = _add_step(a, w, g, products, squares, PRECISION, WIDEN)
    else:
        for first in tl.range(0, K, STEP, num_stages=STAGES):
            w = _step(w_pointers, k, first, None, K, EVEN_K)
            a = _step(x_pointers, k, first, x_mask, K, EVEN_K)
            g = None if norm_weight is None else _step(norm_weight + k, k, first, None, K, EVEN_K)
            products, squares = _add_step(a, w, g, products, squares, PRECISION, WIDEN)
    if PDL and not LAUNCH_EARLY:
        tl.extra.cuda.gdc_launch_dependents()

    y = tl.sum(products, axis=0)
    if norm_weight is not None:
        diagonal = tl.where(m[:, None] == m[None, :], tl.sum(squares, axis=0), 0.0)
        y *= tl.rsqrt(tl.sum(diagonal, axis=1) / K + eps)[:, None]
    _finish(y, bias, residual, out, m, tile, rows, M, N, BLOCK_N, GATED)


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
    config: LinearConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    m, k = x.shape
    n = weight.shape[0]
    assert m <= MAX_ROWS and weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    config = config or linear_config(m, n, k, dtype=x.dtype, num_sms=_num_sms(x.device))
    if out is None:
        out = residual if residual is not None else x.new_empty(m, n // 2 if gated else n)
    assert out.is_contiguous() and (residual is None or residual.is_contiguous())
    assert out.data_ptr() != x.data_ptr()  # other programs still read x when the first ones write
    tiles = triton.cdiv(n, config.block_n)
    assert m <= config.block_m
    if config.block_m == 1:
        launch(
            _one_row_kernel,
            (tiles,),
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
            num_warps=config.num_warps,
            pdl=pdl,
        )
        return out
    launch(
        _few_rows_kernel,
        (tiles,),
        x,
        weight,
        bias,
        norm_weight,
        residual,
        out,
        m,
        n,
        k,
        x.stride(0),
        eps,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SLICES=config.slices,
        ONE_STEP=k <= config.slices * config.block_k,
        EVEN_K=k % (config.slices * config.block_k) == 0,
        GATED=gated,
        PDL=pdl,
        LAUNCH_EARLY=LAUNCH_EARLY,
        STAGES=config.num_stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        WIDEN=not isinstance(_few_rows_kernel, triton.JITFunction),  # the interpreter's dot does not know bfloat16
        num_warps=config.num_warps,
        pdl=pdl,
    )
    return out
