"""A linear layer for a single row, fused with the RMS norm before it and the activation or residual after it.

y = norm(x) W^T + bias; if gated, y = silu(gate) * up; then residual + y. Reading the weight limits the speed, so each
program reads a few rows of it exactly once. The norm takes no extra pass: norm(x) W^T = rstd * ((x * norm_weight) W^T),
and x's sum of squares is accumulated in the same loop over K.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch

NUM_ROWS = 4  # rows of the weight per program


def linear_reference(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    *,
    bias: Tensor | None = None,  # [N]
    norm_weight: Tensor | None = None,  # [K]
    eps: float = 0.0,
    residual: Tensor | None = None,  # [M, N], or [M, N / 2] if gated
    gated: bool = False,
    scale: Tensor | None = None,  # [N] float32, of an int8 weight
) -> Tensor:
    """Any number of rows; the reference of few_rows.py, tiled.py and many_rows.py too."""
    y = x.float()
    if norm_weight is not None:
        y = F.rms_norm(y, y.shape[-1:], norm_weight.float(), eps)
    y = F.linear(y, weight.float())
    if scale is not None:
        y = y * scale
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = residual.float() + y
    return y.to(x.dtype)


@triton.jit
def weight_rows(i, first, N, GATED: tl.constexpr):
    """The weight rows that outputs `first`, `first` + 1, ... need, for indices `i` into a tile, clamped to N outputs.

    Gated, even indices are gate rows and odd ones the matching up rows, so that one thread holds both.
    """
    if GATED:
        return tl.minimum(first + i // 2, N - 1) + i % 2 * N
    else:
        return tl.minimum(first + i, N - 1)


@triton.jit
def columns_of(pointers, k, first: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns from `first` on; zeros past K."""
    if first + BLOCK_K <= K:
        return tl.load(pointers + first)
    else:
        return tl.load(pointers + first, mask=first + k < K, other=0.0)


@triton.jit
def _one_row_kernel(
    x,
    weight,
    scale,
    bias,
    norm_weight,
    residual,
    out,
    N,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    AHEAD: tl.constexpr = min(STEPS, 4)  # weight tiles loaded before x is available
    WIDTH: tl.constexpr = ROWS // 2 if GATED else ROWS
    num_columns = N // 2 if GATED else N
    first = tl.program_id(0) * WIDTH
    rows = weight_rows(tl.arange(0, ROWS), first, num_columns, GATED)
    k = tl.arange(0, BLOCK_K)
    if scale is not None:
        # A thread loads as many int8 items as items of x, else x would be converted to the weight's layout in shared
        # memory, which takes a barrier.
        k = tl.max_contiguous(k, 128 // x.dtype.element_ty.primitive_bitwidth)
    w_pointers = weight + rows.to(tl.int64)[:, None] * K + k[None, :]

    ahead = ()  # type: tuple
    for step in tl.static_range(AHEAD):
        ahead += (columns_of(w_pointers, k[None, :], step * BLOCK_K, K, BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    n = first + tl.arange(0, WIDTH)
    if residual is not None:
        before = tl.load(residual + n, mask=n < num_columns, other=0.0)
        tl.debug_barrier()  # keeps the compiler from moving the load down to its use
    products = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        w = ahead[step] if step < AHEAD else columns_of(w_pointers, k[None, :], step * BLOCK_K, K, BLOCK_K)
        a = columns_of(x + k, k, step * BLOCK_K, K, BLOCK_K).to(tl.float32)
        if norm_weight is not None:
            squares += a * a
            a *= columns_of(norm_weight + k, k, step * BLOCK_K, K, BLOCK_K).to(tl.float32)
        products += w.to(tl.float32) * a[None, :]
    y = tl.sum(products, axis=1)
    if norm_weight is not None:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    if scale is not None:
        y *= tl.load(scale + rows)
    if bias is not None:
        y += tl.load(bias + rows).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (WIDTH, 2)))
        y = gate * tl.sigmoid(gate) * up
    if residual is not None:
        y += before.to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_columns)


def one_row_linear(
    x: Tensor,  # [1, K]
    weight: Tensor,  # [N, K] of x's type, or int8 with `scale`; gated: the gate rows, then the up rows
    *,
    scale: Tensor | None = None,  # [N] float32: row n of an int8 weight stands for weight[n] * scale[n]
    bias: Tensor | None = None,  # [N]
    norm_weight: Tensor | None = None,  # [K]; None: no norm
    eps: float = 0.0,
    residual: Tensor | None = None,  # [1, N], or [1, N / 2] if gated; updated in place and returned
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    (n, k), num_rows = weight.shape, x.shape[0]
    assert num_rows == 1 and x.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    out = residual if residual is not None else x.new_empty(1, n // 2 if gated else n)
    assert out.is_contiguous() and out.data_ptr() != x.data_ptr()  # some programs still read x when others write
    assert weight.dtype == (x.dtype if scale is None else torch.int8)
    num_warps = 8 if 4096 <= k <= 8192 else 2
    launch(
        _one_row_kernel,
        (cdiv(n, NUM_ROWS),),
        x,
        weight,
        scale,
        bias,
        norm_weight,
        residual,
        out,
        n,
        eps,
        K=k,
        ROWS=NUM_ROWS,
        BLOCK_K=256 * num_warps,
        GATED=gated,
        PDL=pdl,
        num_warps=num_warps,
        pdl=pdl,
    )
    return out
