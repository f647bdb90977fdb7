"""Root-mean-square norm in one pass, alone or behind the residual's addition."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

MANY_ROWS = 1024  # from here on programs are plenty and take several rows each


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [M, hidden], [hidden]
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    M,
    hidden,
    x_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (m < M) & (column < hidden)
    m = m.to(tl.int64)
    w = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + m * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + m * hidden + column, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + m * hidden + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / hidden + eps)
    tl.store(out + m * hidden + column, (value * scale[:, None] * w).to(out.dtype.element_ty), mask=mask)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, pdl: bool) -> Tensor:
    m, hidden = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    block = triton.next_power_of_2(hidden)
    rows = max(1, 4096 // block) if m >= MANY_ROWS else 1
    _rms_norm_kernel[(triton.cdiv(m, rows),)](
        x,
        residual,
        weight,
        out,
        m,
        hidden,
        x.stride(0),
        eps,
        ROWS=rows,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(rows * block // 256, 1), 8),
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """x [M, hidden] normed and scaled by weight [hidden]; a row of x may be part of a wider one."""
    return _launch(x, None, weight, eps, x.new_empty(x.shape) if out is None else out, pdl)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """Adds x to the residual in place; the norm of that, all [M, hidden]."""
    assert residual.shape == x.shape and residual.is_contiguous()
    return _launch(x, residual, weight, eps, x.new_empty(x.shape), pdl)
