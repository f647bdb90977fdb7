"""A linear layer added to a few rows: weights so narrow that cuBLAS finds too little to do at once."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels import launch

MAX_ROWS = 16


def few_rows_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return (residual.float() + y).to(x.dtype)


@triton.jit
def _step(pointers, first, row_mask, k, K, EVEN_K: tl.constexpr):
    """What lies a step from column `first` on, of the rows in the mask; zeros elsewhere."""
    if EVEN_K:
        return tl.load(pointers + first, mask=row_mask, other=0.0)
    else:
        return tl.load(pointers + first, mask=row_mask & (first + k < K), other=0.0)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    residual,
    M,
    N,
    K,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    # Every tile has a leading dimension, the slice, and a warp multiplies one: it then has K / SLICES dependent steps
    # instead of K. The slices of a step are neighbours in memory.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    w_pointers = weight + n.to(tl.int64)[None, :, None] * K + k
    x_pointers = x + m[None, :, None] * x_stride + k
    products = tl.zeros([SLICES, ROWS, BLOCK_N], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in tl.range(0, K, SLICES * BLOCK_K, num_stages=STAGES):
        w = _step(w_pointers, first, n[None, :, None] < N, k, K, EVEN_K)
        a = _step(x_pointers, first, m[None, :, None] < M, k, K, EVEN_K)
        if WIDEN:
            a, w = a.to(tl.float32), w.to(tl.float32)
        products = tl.dot(a, tl.permute(w, (0, 2, 1)), products, input_precision=PRECISION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    y = tl.sum(products, axis=0)
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = residual + m[:, None] * N + n[None, :]
    mask = (m[:, None] < M) & (n[None, :] < N)
    y += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, y.to(residual.dtype.element_ty), mask=mask)


def few_rows_linear(
    x: Tensor,  # [M, K], M <= MAX_ROWS
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
    residual: Tensor,  # [M, N], added to in place and returned
    *,
    pdl: bool = False,
) -> Tensor:
    (m, k), n = x.shape, weight.shape[0]
    assert m <= MAX_ROWS and weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    assert residual.shape == (m, n) and residual.is_contiguous()
    # narrow weights: few columns a program, so that there are enough programs
    if x.dtype == torch.float32:
        block_n, block_k, slices, stages = 16, 32, 4, 2
    elif n < 2048:
        block_n, block_k, slices, stages = 8, 64, 8, 4
    elif n < 4096:
        block_n, block_k, slices, stages = 16, 64, 4, 5
    else:
        block_n, block_k, slices, stages = 32, 64, 4, 6
    launch(
        _few_rows_kernel,
        (triton.cdiv(n, block_n),),
        x,
        weight,
        bias,
        residual,
        m,
        n,
        k,
        x.stride(0),
        ROWS=MAX_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SLICES=slices,
        EVEN_K=k % (slices * block_k) == 0,
        STAGES=stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        WIDEN=not isinstance(_few_rows_kernel, triton.JITFunction),  # the interpreter's dot does not know bfloat16
        PDL=pdl,
        num_warps=slices,
        pdl=pdl,
    )
    return residual
