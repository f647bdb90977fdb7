"""Root-mean-square norm, a row a program: what a row gives does not depend on how many there are."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels import launch


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [M, hidden], [hidden]
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


@triton.jit
def _rms_norm_kernel(x, weight, out, hidden, x_stride, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + m * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    tl.store(out + m * hidden + column, (value * scale * w).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x [M, hidden] normed and scaled by weight [hidden]; a row of x may be part of a wider one."""
    m, hidden = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous()
    out = x.new_empty(x.shape)
    block = triton.next_power_of_2(hidden)
    num_warps = min(max(block // 256, 1), 8)
    stride = x.stride(0)
    launch(
        _rms_norm_kernel, (m,), x, weight, out, hidden, stride, eps, BLOCK=block, PDL=pdl, num_warps=num_warps, pdl=pdl
    )
    return out
