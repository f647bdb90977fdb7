"""A linear layer for a few rows: weights so small that starting to read them is what takes the time.

y = x W^T + bias; gated: silu(gate) * up of it; then residual + y. The first steps of the weight are on their way while
the kernel before still computes x, and the next kernel may start as early.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels import launch

MAX_ROWS = 16


@dataclass(frozen=True)
class Tiles:
    """Rows of the weight a program, columns a warp multiplies in a step, warps, and how far ahead it all is read."""

    block_n: int
    block_k: int
    slices: int
    num_stages: int
    num_ahead: int  # steps before anything is known of x


FLOAT32 = Tiles(16, 32, 4, 2, 1)
NARROW = Tiles(8, 128, 8, 3, 2)  # few rows a program, so that there are enough programs
WIDE = Tiles(16, 128, 4, 3, 2)
LARGE = Tiles(16, 128, 4, 3, 1)


def _tiles(n: int, k: int, dtype: torch.dtype, *, adds: bool) -> Tiles:
    """What measured best on an H200."""
    if dtype == torch.float32:
        return FLOAT32
    if n < 2048:
        return NARROW
    return LARGE if n >= 4096 and k >= 4096 and not adds else WIDE


@triton.jit
def load_step(pointers, first, k, K: tl.constexpr, STEP: tl.constexpr):
    """What lies a step from column `first` on; zeros past the end."""
    if K % STEP == 0:
        return tl.load(pointers + first)
    else:
        return tl.load(pointers + first, mask=first + k < K, other=0.0)


@triton.jit
def _step_of_rows(pointers, first, row_mask, k, K: tl.constexpr, STEP: tl.constexpr):
    """The same of the rows in the mask; zeros elsewhere."""
    if K % STEP == 0:
        return tl.load(pointers + first, mask=row_mask, other=0.0)
    else:
        return tl.load(pointers + first, mask=row_mask & (first + k < K), other=0.0)


@triton.jit
def _add_product(products, a, w, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a, w = a.to(tl.float32), w.to(tl.float32)
    return tl.dot(a, tl.permute(w, (0, 2, 1)), products, input_precision=PRECISION)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    M,
    N,  # columns of `out`
    x_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    MOST_AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    # Every tile has a leading dimension, the slice, and a warp multiplies one: it then has K / SLICES dependent steps
    # instead of K. The slices of a step are neighbours in memory.
    STEP: tl.constexpr = SLICES * BLOCK_K
    AHEAD: tl.constexpr = min((K + STEP - 1) // STEP, MOST_AHEAD)
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    i = tl.arange(0, BLOCK_N)
    if GATED:  # even rows are gates, odd ones their ups, so that one thread holds both
        w_rows = tl.minimum(tl.program_id(0) * WIDTH + i // 2, N - 1) + i % 2 * N
    else:
        w_rows = tl.minimum(tl.program_id(0) * WIDTH + i, N - 1)
    m = tl.arange(0, ROWS)
    is_row = m[None, :, None] < M
    k = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    w_pointers = weight + w_rows.to(tl.int64)[None, :, None] * K + k
    x_pointers = x + m[None, :, None] * x_stride + k

    ahead = ()  # type: tuple
    for step in tl.static_range(AHEAD):
        ahead += (load_step(w_pointers, step * STEP, k, K, STEP),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    products = tl.zeros([SLICES, ROWS, BLOCK_N], tl.float32)
    for step in tl.static_range(AHEAD):
        a = _step_of_rows(x_pointers, step * STEP, is_row, k, K, STEP)
        products = _add_product(products, a, ahead[step], PRECISION, WIDEN)
    for first in tl.range(AHEAD * STEP, K, STEP, num_stages=STAGES):
        w = load_step(w_pointers, first, k, K, STEP)
        a = _step_of_rows(x_pointers, first, is_row, k, K, STEP)
        products = _add_product(products, a, w, PRECISION, WIDEN)

    y = tl.sum(products, axis=0)
    if bias is not None:
        y += tl.load(bias + w_rows).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(y, (ROWS, WIDTH, 2)))
        y = gate * tl.sigmoid(gate) * up
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    place = m[:, None] * N + n[None, :]
    mask = (m[:, None] < M) & (n[None, :] < N)
    if residual is not None:
        y += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def few_rows_linear(
    x: Tensor,  # [M, K], M <= MAX_ROWS
    weight: Tensor,  # [N, K]; gated: the gates' rows, then the ups'
    *,
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [M, N], or [M, N / 2] if gated: added to in place and returned
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    (m, k), num_weight_rows = x.shape, weight.shape[0]
    n = num_weight_rows // 2 if gated else num_weight_rows
    assert m <= MAX_ROWS and weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    out = residual if residual is not None else x.new_empty(m, n)
    assert out.shape == (m, n) and out.is_contiguous()
    assert out.data_ptr() != x.data_ptr()  # programs still read x when the first ones write
    tiles = _tiles(num_weight_rows, k, x.dtype, adds=residual is not None)
    launch(
        _few_rows_kernel,
        (triton.cdiv(num_weight_rows, tiles.block_n),),
        x,
        weight,
        bias,
        residual,
        out,
        m,
        n,
        x.stride(0),
        K=k,
        ROWS=MAX_ROWS,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SLICES=tiles.slices,
        STAGES=tiles.num_stages,
        MOST_AHEAD=tiles.num_ahead,
        GATED=gated,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        WIDEN=not isinstance(_few_rows_kernel, triton.JITFunction),  # the interpreter's dot does not know bfloat16
        PDL=pdl,
        num_warps=tiles.slices,
        pdl=pdl,
    )
    return out
