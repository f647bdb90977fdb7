"""Root-mean-square norm, a row a program: what a row gives does not depend on how many there are.

Where parts of a sum have still to be added to the rows, they are added on the way.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launch, next_power_of_2


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [M, hidden], [hidden]
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def add_parts_reference(x: Tensor, parts: Tensor) -> Tensor:  # [M, hidden], [parts, M, hidden]
    return (x.float() + parts.sum(0)).to(x.dtype)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x, parts, weight, out, M, hidden, x_stride, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
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
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            value += tl.load(parts + (part * M + m) * hidden + column, mask=mask, other=0.0)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + m * x_stride + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
        tl.store(out + m * hidden + column, (value * scale * w).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x [M, hidden] normed and scaled by weight [hidden]; a row of x may be part of a wider one."""
    assert weight.is_contiguous()
    out = x.new_empty(x.shape)
    _launch(x, None, weight, out, eps, pdl=pdl)
    return out


def add_rms_norm(x: Tensor, parts: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x [M, hidden] += the sum of parts [parts, M, hidden]; gives its norm."""
    assert weight.is_contiguous()
    out = x.new_empty(x.shape)
    _launch(x, parts, weight, out, eps, pdl=pdl)
    return out


def add_parts(x: Tensor, parts: Tensor, *, pdl: bool = False) -> None:
    """x [M, hidden] += the sum of parts [parts, M, hidden], added up in their order."""
    _launch(x, parts, None, None, 0.0, pdl=pdl)


def _launch(
    x: Tensor, parts: Tensor | None, weight: Tensor | None, out: Tensor | None, eps: float, *, pdl: bool
) -> None:
    m, hidden = x.shape
    assert x.stride(1) == 1 and (parts is None or (parts.is_contiguous() and parts.shape[1:] == x.shape))
    block = next_power_of_2(hidden)
    # With parts, four columns a thread: the compiler has a thread with more of them wait for one load after the other.
    columns_a_warp, most_warps = (128, 32) if parts is not None else (256, 8)
    launch(
        _rms_norm_kernel,
        (m,),
        x,
        parts,
        weight,
        out,
        m,
        hidden,
        x.stride(0),
        eps,
        PARTS=0 if parts is None else parts.shape[0],
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // columns_a_warp, 1), most_warps),
        pdl=pdl,
    )
