"""Gate and up of the MLP and what joins them, silu(x Wg^T) * (x Wu^T), for tens of rows in one launch."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels import launch

MAX_ROWS = 64
BLOCK_K = 128
NUM_STAGES = 4


@dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    weight_left: bool  # tensor cores take 64 rows on the left: the weight's, where x has fewer


def _tile(m: int) -> Tile:
    """What measured best on an H200."""
    if m <= 32:
        return Tile(16 if m <= 16 else 32, 64, True)
    return Tile(64, 32, False)


@triton.jit
def _step(pointers, first, k, K, EVEN_K: tl.constexpr):
    """What lies BLOCK_K columns from `first` on; zeros past the end."""
    if EVEN_K:
        return tl.load(pointers + first)
    else:
        return tl.load(pointers + first, mask=first + k < K, other=0.0)


@triton.jit
def _add_product(y, a, w, WEIGHT_LEFT: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a, w = a.to(tl.float32), w.to(tl.float32)
    if WEIGHT_LEFT:
        return tl.dot(w, tl.trans(a), y)
    else:
        return tl.dot(a, tl.trans(w), y)


@triton.jit(do_not_specialize=["M"])
def _gated_linear_kernel(
    x,
    weight,
    bias,
    out,
    M,
    N,  # columns of `out`
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    w_row = tl.minimum(n, N - 1)
    gate_pointers = weight + w_row.to(tl.int64)[:, None] * K + k
    up_pointers = gate_pointers + tl.cast(N, tl.int64) * K
    x_pointers = x + tl.minimum(m, M - 1)[:, None] * x_stride + k
    if WEIGHT_LEFT:
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        m, n, w_row = m[None, :], n[:, None], w_row[:, None]
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        m, n, w_row = m[:, None], n[None, :], w_row[None, :]
    up = gate
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = _step(x_pointers, first, k, K, EVEN_K)
        gate_w = _step(gate_pointers, first, k, K, EVEN_K)
        up_w = _step(up_pointers, first, k, K, EVEN_K)
        gate = _add_product(gate, a, gate_w, WEIGHT_LEFT, WIDEN)
        up = _add_product(up, a, up_w, WEIGHT_LEFT, WIDEN)
    if bias is not None:
        gate += tl.load(bias + w_row).to(tl.float32)
        up += tl.load(bias + N + w_row).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + m * N + n, y.to(out.dtype.element_ty), mask=(m < M) & (n < N))


def gated_linear(
    x: Tensor,  # [M, K] bfloat16 or float16, M <= MAX_ROWS
    weight: Tensor,  # [2 * N, K], the gates' rows, then the ups'
    bias: Tensor | None = None,  # [2 * N]
    *,
    pdl: bool = False,
) -> Tensor:  # [M, N]
    (m, k), n = x.shape, weight.shape[0] // 2
    assert m <= MAX_ROWS and weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    assert x.dtype != torch.float32
    out = x.new_empty(m, n)
    tile = _tile(m)
    launch(
        _gated_linear_kernel,
        (triton.cdiv(n, tile.block_n),),
        x,
        weight,
        bias,
        out,
        m,
        n,
        k,
        x.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=BLOCK_K,
        EVEN_K=k % BLOCK_K == 0,
        STAGES=NUM_STAGES,
        WEIGHT_LEFT=tile.weight_left,
        WIDEN=not isinstance(_gated_linear_kernel, triton.JITFunction),  # the interpreter's dot does not know bfloat16
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
    return out
