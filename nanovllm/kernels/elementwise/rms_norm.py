"""RMS norm, one program per row, so that a row's result does not depend on the number of rows.

With the partial sums of a split-K linear, the kernel first adds them to the rows, in place.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launch, next_power_of_2


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [M, hidden], [hidden]
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def add_partial_sums_reference(x: Tensor, partial_sums: Tensor) -> Tensor:  # [M, hidden], [splits, M, hidden]
    return (x.float() + partial_sums.sum(0)).to(x.dtype)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x, partial_sums, weight, out, M, hidden, x_stride, eps, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    if weight is not None:
        w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + m * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if SPLITS > 0:
        for split in tl.static_range(SPLITS):
            value += tl.load(partial_sums + (split * M + m) * hidden + column, mask=mask, other=0.0)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + m * x_stride + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
        tl.store(out + m * hidden + column, (value * scale * w).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """The RMS norm of x [M, hidden], times weight [hidden]. x may be a column slice of a wider tensor."""
    assert weight.is_contiguous()
    out = x.new_empty(x.shape)
    _launch(x, None, weight, out, eps, pdl=pdl)
    return out


def add_rms_norm(x: Tensor, partial_sums: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x [M, hidden] += partial_sums [splits, M, hidden], summed over splits; returns the norm of the result."""
    assert weight.is_contiguous()
    out = x.new_empty(x.shape)
    _launch(x, partial_sums, weight, out, eps, pdl=pdl)
    return out


def add_partial_sums(x: Tensor, partial_sums: Tensor, *, pdl: bool = False) -> None:
    """x [M, hidden] += partial_sums [splits, M, hidden], added split by split."""
    _launch(x, partial_sums, None, None, 0.0, pdl=pdl)


def _launch(
    x: Tensor, partial_sums: Tensor | None, weight: Tensor | None, out: Tensor | None, eps: float, *, pdl: bool
) -> None:
    m, hidden = x.shape
    assert x.stride(1) == 1
    assert partial_sums is None or (partial_sums.is_contiguous() and partial_sums.shape[1:] == x.shape)
    block = next_power_of_2(hidden)
    # With partial sums, four columns per thread: with more, the compiler serializes a thread's loads.
    columns_a_warp, most_warps = (128, 32) if partial_sums is not None else (256, 8)
    launch(
        _rms_norm_kernel,
        (m,),
        x,
        partial_sums,
        weight,
        out,
        m,
        hidden,
        x.stride(0),
        eps,
        SPLITS=0 if partial_sums is None else partial_sums.shape[0],
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // columns_a_warp, 1), most_warps),
        pdl=pdl,
    )
