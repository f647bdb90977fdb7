"""The norm of each head of a gated delta net, times the SiLU of its output gate."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.delta_net.gates import gated_norm
from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

TILE = 1024  # numbers of a program


def norm_heads_reference(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:  # [num_tokens, heads, dim] each
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps).to(z.dtype) * weight
    return (normed.float() * F.silu(z.float())).to(z.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_heads_kernel(
    x,
    z,
    weight,
    eps,
    num_tokens,
    z_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # of [num_tokens * HEADS]
    token = row // HEADS
    column = tl.arange(0, PADDED)[None, :]
    inside = (token < num_tokens) & (column < DIM)
    w = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = x + row * DIM + column
    value = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + row % HEADS * DIM + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(own, gated_norm(value, w, gate, eps, DIM, 1, x.dtype.element_ty), mask=inside)


def norm_heads(
    x: Tensor,  # [num_tokens, heads * dim], replaced
    z: Tensor,  # [num_tokens, heads * dim], maybe columns of a wider tensor
    weight: Tensor,  # [dim]
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    assert x.is_contiguous() and z.stride(1) == 1 and weight.is_contiguous() and x.shape == z.shape
    heads, dim = x.shape[1] // weight.shape[0], weight.shape[0]
    padded = next_power_of_2(dim)
    rows = max(1, TILE // padded)
    launch(
        _norm_heads_kernel,
        (cdiv(x.shape[0] * heads, rows),),
        x,
        z,
        weight,
        eps,
        x.shape[0],
        z.stride(0),
        HEADS=heads,
        DIM=dim,
        PADDED=padded,
        ROWS=rows,
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
