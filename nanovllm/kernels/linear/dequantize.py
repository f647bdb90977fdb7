"""Dequantize an int8 weight with one scale per output row.

For large row counts the matrix product takes longer than reading the weight: dequantizing it once and calling cuBLAS is
then faster than converting every tile inside a kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

MAX_BLOCK = 4096  # columns per program


def dequantize_reference(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:  # [N, K], [N] -> [N, K]
    return (weight.float() * scale[:, None]).to(dtype)


@triton.jit
def _dequantize_kernel(weight, scale, out, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per row of the weight and BLOCK columns."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(weight + n * K + k, mask=k < K, other=0).to(tl.float32) * tl.load(scale + n)
    if PDL:
        tl.extra.cuda.gdc_wait()  # an earlier kernel may still read the memory that `out` reuses
    tl.store(out + n * K + k, value.to(out.dtype.element_ty), mask=k < K)


def dequantize(
    weight: Tensor,  # [N, K] int8
    scale: Tensor,  # [N] float32
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,  # [N, K] of `dtype`
    pdl: bool = False,
) -> Tensor:
    """weight * scale[:, None], [N, K] of `dtype`."""
    n, k = weight.shape
    assert weight.dtype == torch.int8 and weight.is_contiguous() and scale.is_contiguous() and scale.shape == (n,)
    out = torch.empty(n, k, dtype=dtype, device=weight.device) if out is None else out
    assert out.shape == (n, k) and out.dtype == dtype and out.is_contiguous()
    block = min(MAX_BLOCK, next_power_of_2(k))
    num_warps = max(1, block // 512)  # 16 columns per thread, one load of 16 bytes
    launch(
        _dequantize_kernel,
        (n, cdiv(k, block)),
        weight,
        scale,
        out,
        k,
        BLOCK=block,
        PDL=pdl,
        num_warps=num_warps,
        pdl=pdl,
    )
    return out
