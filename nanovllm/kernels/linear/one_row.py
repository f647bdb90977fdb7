"""A linear layer for a single row: the weight streams by once, with norm, gate and residual folded in at either end.

y = norm(x) W^T + bias; gated: silu(gate) * up of it; then residual + y. The RMS norm costs no pass of its own:
norm(x) W^T = rstd * ((x * norm_weight) W^T), and x's sum of squares grows along the same loop over K.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch

NUM_ROWS = 4  # of the weight, a program


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
    """For any number of rows: of this kernel, and of those for a few and for gates."""
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
    """Which rows of a weight `i` counts for outputs from `first` on, of N; past the end the last one again."""
    if GATED:  # even ones are gates, odd ones their ups, so that one thread holds both
        return tl.minimum(first + i // 2, N - 1) + i % 2 * N
    else:
        return tl.minimum(first + i, N - 1)


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
    AHEAD: tl.constexpr = min(STEPS, 4)  # tiles of the weight on their way before anything is known of x
    WIDTH: tl.constexpr = ROWS // 2 if GATED else ROWS
    num_columns = N // 2 if GATED else N
    first = tl.program_id(0) * WIDTH
    rows = weight_rows(tl.arange(0, ROWS), first, num_columns, GATED)
    k = tl.arange(0, BLOCK_K)
    if scale is not None:
        # as many int8 items per thread as it loads of x: else x is converted to the weight's layout in shared memory
        k = tl.max_contiguous(k, 128 // x.dtype.element_ty.primitive_bitwidth)
    w_pointers = weight + rows.to(tl.int64)[:, None] * K + k[None, :]

    ahead = ()  # type: tuple
    for step in tl.static_range(AHEAD):
        ahead += (_columns(w_pointers, k[None, :], step * BLOCK_K, K, BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    n = first + tl.arange(0, WIDTH)
    if residual is not None:
        before = tl.load(residual + n, mask=n < num_columns, other=0.0)
        tl.debug_barrier()  # asked for here, not where it is used
    products = tl.zeros([ROWS, BLOCK_K], tl.float32)
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
    weight: Tensor,  # [N, K] of x's type, or int8 with `scale`; gated: the gates' rows, then the ups'
    *,
    scale: Tensor | None = None,  # [N] float32: the value of an int8 weight's row is row * scale
    bias: Tensor | None = None,  # [N]
    norm_weight: Tensor | None = None,  # [K]; None = x is not normed
    eps: float = 0.0,
    residual: Tensor | None = None,  # [1, N], or [1, N / 2] if gated: added to in place and returned
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    (n, k), num_rows = weight.shape, x.shape[0]
    assert num_rows == 1 and x.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    out = residual if residual is not None else x.new_empty(1, n // 2 if gated else n)
    assert out.is_contiguous() and out.data_ptr() != x.data_ptr()  # programs still read x when the first ones write
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
