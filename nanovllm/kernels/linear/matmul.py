"""The deterministic (batch-invariant) matrix product: a row's bits depend on that row and the weight alone.

Every output element is accumulated over K in the same order and the same steps, whatever the number of rows: no split-K
and no choice of algorithm by shape. Only the number of elements per program depends on the number of rows.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch

BLOCK_K = 64
GROUP = 8  # row tiles that walk the weight's tiles together, so that these are read from L2


class Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


FEW_ROWS = Tile(64, 32, num_warps=4, num_stages=6)
MANY_ROWS = Tile(128, 128, num_warps=8, num_stages=4)
FLOAT32 = Tile(32, 32, num_warps=4, num_stages=2)


def matmul_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor | None = None
) -> Tensor:  # [M, K], [N, K], [N], [N]
    y = F.linear(x.float(), weight.float())
    if scale is not None:
        y = y * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    M,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # Program order for L2 reuse: GROUP row tiles with one column tile, then with the next column tile.
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group_first = program // (GROUP * column_tiles) * GROUP
    group_rows = tl.minimum(row_tiles - group_first, GROUP)
    within = program % (GROUP * column_tiles)
    m = (group_first + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)

    k = tl.arange(0, BLOCK_K)[None, :]
    x_pointers = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride + k
    w_pointers = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            a = tl.load(x_pointers + first)
            w = tl.load(w_pointers + first)
        else:
            a = tl.load(x_pointers + first, mask=first + k < K, other=0.0)
            w = tl.load(w_pointers + first, mask=first + k < K, other=0.0)
        if WIDEN:
            a, w = a.to(tl.float32), w.to(tl.float32)
        elif w.dtype == tl.int8:
            w = w.to(a.dtype)
        y = tl.dot(a, tl.trans(w), y, input_precision=PRECISION)
    if scale is not None:
        y *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    offset = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]. An int8 weight has a float32 scale [N]."""
    m, k = x.shape
    n = weight.shape[0]
    assert weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    assert weight.dtype == (x.dtype if scale is None else torch.int8)
    out = x.new_empty(m, n)
    tile = FLOAT32 if x.dtype == torch.float32 else FEW_ROWS if m <= FEW_ROWS.block_m else MANY_ROWS
    launch(
        _matmul_kernel,
        (cdiv(m, tile.block_m) * cdiv(n, tile.block_n),),
        x,
        weight,
        scale,
        bias,
        out,
        m,
        n,
        k,
        x.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=BLOCK_K,
        GROUP=GROUP,
        EVEN_K=k % BLOCK_K == 0,
        STAGES=tile.num_stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        WIDEN=not isinstance(_matmul_kernel, triton.JITFunction),  # the interpreter's dot does not support bfloat16
        num_warps=tile.num_warps,
    )
    return out
