"""A linear layer for 2 to 16 rows of a narrow model, where latency rather than bandwidth is the limit.

y = norm(x) W^T + bias; if gated, y = silu(gate) * up; then residual + y. With programmatic dependent launch the first
weight tiles are loaded while the previous kernel still computes x. Tiles go from global memory directly into
tensor-core fragments (see fragments.py). The norm is fused as in one_row.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.fragments import all_loads_issued, halves, operand, rows_of, word, words_of
from nanovllm.kernels.linear.one_row import weight_rows

MAX_ROWS = 16
X_AHEAD = 4  # steps of x in flight at once


@dataclass(frozen=True)
class Tiles:
    block_n: int  # rows of the weight per program
    chunks: int  # chunks of 32 columns that a warp multiplies in one step
    num_warps: int  # the warps of a program divide the columns of a step
    num_ahead: int  # steps of the weight loaded before x is available


MANY_OUTPUTS = Tiles(16, 4, 4, 2)
FEW_OUTPUTS = Tiles(8, 4, 4, 4)  # few rows per program, so that there are enough programs
LONG_ROWS = Tiles(8, 4, 8, 3)


def _tiles(n: int, k: int) -> Tiles:
    """The tiles that measured fastest on an H200."""
    if n > 2048:
        return MANY_OUTPUTS
    return LONG_ROWS if k > 2048 else FEW_OUTPUTS


def few_rows_serves(dtype: torch.dtype, k: int) -> bool:
    """Whether the kernel supports this type and row length: 16-bit items in whole units of 16 bytes."""
    return dtype in (torch.bfloat16, torch.float16) and k % 8 == 0


@triton.jit
def load_step(pointers, first, k, K: tl.constexpr, STEP: tl.constexpr, mask=None):
    """Load one step of columns from `first` on; zeros past K and outside the mask."""
    if K % STEP != 0:
        inside = first + k < K
        mask = inside if mask is None else mask & inside
    if mask is None:
        return tl.load(pointers + first)
    else:
        return tl.load(pointers + first, mask=mask, other=0)


@triton.jit
def _replaced(tiles, INDEX: tl.constexpr, tile):
    result = ()  # type: tuple
    for i in tl.static_range(len(tiles)):
        result += (tile if i == INDEX else tiles[i],)
    return result


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    M,
    N,  # columns of `out`
    x_stride,
    eps,
    K: tl.constexpr,
    EIGHTS: tl.constexpr,  # blocks of eight rows of x
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    MOST_AHEAD: tl.constexpr,
    MOST_X_AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    ITEM: tl.constexpr = x.dtype.element_ty
    DOT_TYPE: tl.constexpr = tl.float32 if INTERPRETED else ITEM  # the interpreter's dot does not support bfloat16
    ROWS: tl.constexpr = 16  # of mma's left operand
    WORDS: tl.constexpr = K // 2  # 32-bit words per row
    STEP: tl.constexpr = WARPS * CHUNKS * 16  # in words
    STEPS: tl.constexpr = (WORDS + STEP - 1) // STEP
    AHEAD: tl.constexpr = min(STEPS, MOST_AHEAD)
    X_AHEAD: tl.constexpr = min(STEPS, MOST_X_AHEAD)
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_n = tl.program_id(0) * WIDTH
    w_rows = weight_rows(rows_of(BLOCK_N // 8), first_n, N, GATED)
    row = rows_of(EIGHTS)
    k = words_of(WARPS, CHUNKS)
    w_pointers = weight.to(tl.pointer_type(tl.int32)) + w_rows.to(tl.int64) * WORDS + k
    x_pointers = x.to(tl.pointer_type(tl.int32)) + row * (x_stride // 2) + k
    m = tl.arange(0, ROWS)[:, None]
    n = first_n + tl.arange(0, WIDTH)[None, :]
    mask = (m < M) & (n < N)
    offset = m * N + n

    weights = ()  # type: tuple
    for step in tl.static_range(AHEAD):
        weights += (load_step(w_pointers, step * STEP, k, WORDS, STEP),)
    gains = ()  # type: tuple
    if norm_weight is not None:
        # one copy per row, in the same layout as x
        gain_pointers = norm_weight.to(tl.pointer_type(tl.int32)) + tl.broadcast_to(k, x_pointers.shape)
        for step in tl.static_range(STEPS):
            gains += (load_step(gain_pointers, step * STEP, k, WORDS, STEP),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if residual is not None:
        before = tl.load(residual + offset, mask=mask, other=0.0)
        tl.debug_barrier()  # keeps the compiler from moving the load down to its use
    xs = ()  # type: tuple
    for step in tl.static_range(X_AHEAD):
        xs += (load_step(x_pointers, step * STEP, k, WORDS, STEP, row < M),)
    if not INTERPRETED:
        xs = all_loads_issued(xs)
    products = tl.zeros([WARPS, ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros(x_pointers.shape, tl.float32)
    for step in tl.static_range(STEPS):
        a = xs[step % X_AHEAD]
        if norm_weight is not None:
            low, high = halves(a, ITEM, INTERPRETED)
            low, high = low.to(tl.float32), high.to(tl.float32)
            squares += low * low + high * high
            low_gain, high_gain = halves(gains[step], ITEM, INTERPRETED)
            a = word((low * low_gain.to(tl.float32)).to(ITEM), (high * high_gain.to(tl.float32)).to(ITEM))
        if EIGHTS == 1:  # mma takes sixteen rows: the same eight twice
            a = tl.broadcast_to(a, (4, 8, WARPS, 2, CHUNKS, 4))
        a = operand(a, ITEM, DOT_TYPE, INTERPRETED)
        w = operand(weights[step % AHEAD], ITEM, DOT_TYPE, INTERPRETED)
        products = tl.dot(a, tl.permute(w, (0, 2, 1)), products)
        if step + X_AHEAD < STEPS:
            later = load_step(x_pointers, (step + X_AHEAD) * STEP, k, WORDS, STEP, row < M)
            xs = _replaced(xs, step % X_AHEAD, later)
        if step + AHEAD < STEPS:
            later = load_step(w_pointers, (step + AHEAD) * STEP, k, WORDS, STEP)
            weights = _replaced(weights, step % AHEAD, later)

    y = tl.sum(products, axis=0)
    if norm_weight is not None:
        length = tl.sum(tl.sum(tl.sum(tl.sum(squares, 5), 4), 0), 1)  # [8 rows, EIGHTS]
        length = tl.broadcast_to(tl.permute(length, (1, 0)), (2, 8)) if EIGHTS == 1 else tl.permute(length, (1, 0))
        y *= tl.rsqrt(tl.reshape(length, (ROWS,)) / K + eps)[:, None]
    if bias is not None:
        y += tl.load(bias + weight_rows(tl.arange(0, BLOCK_N), first_n, N, GATED)).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(y, (ROWS, WIDTH, 2)))
        y = gate * tl.sigmoid(gate) * up
    if residual is not None:
        y += before.to(tl.float32)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


def few_rows_linear(
    x: Tensor,  # [M, K], M <= MAX_ROWS
    weight: Tensor,  # [N, K]; gated: the gate rows, then the up rows
    *,
    bias: Tensor | None = None,  # [N]
    norm_weight: Tensor | None = None,  # [K]; None: no norm
    eps: float = 0.0,
    residual: Tensor | None = None,  # [M, N], or [M, N / 2] if gated; updated in place and returned
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    (m, k), num_weight_rows = x.shape, weight.shape[0]
    n = num_weight_rows // 2 if gated else num_weight_rows
    assert m <= MAX_ROWS and weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous()
    assert few_rows_serves(x.dtype, k) and x.dtype == weight.dtype and x.stride(0) % 2 == 0
    out = residual if residual is not None else x.new_empty(m, n)
    assert out.shape == (m, n) and out.is_contiguous()
    assert out.data_ptr() != x.data_ptr()  # some programs still read x when others write
    tiles = _tiles(num_weight_rows, k)
    launch(
        _few_rows_kernel,
        (cdiv(num_weight_rows, tiles.block_n),),
        x,
        weight,
        bias,
        norm_weight,
        residual,
        out,
        m,
        n,
        x.stride(0),
        eps,
        K=k,
        EIGHTS=1 if m <= 8 else 2,
        BLOCK_N=tiles.block_n,
        CHUNKS=tiles.chunks,
        WARPS=tiles.num_warps,
        MOST_AHEAD=tiles.num_ahead,
        MOST_X_AHEAD=X_AHEAD,
        GATED=gated,
        INTERPRETED=not isinstance(_few_rows_kernel, triton.JITFunction),
        PDL=pdl,
        num_warps=tiles.num_warps,
        num_stages=1,  # the kernel loads ahead by itself
        pdl=pdl,
    )
    return out
