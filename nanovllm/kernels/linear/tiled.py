"""A linear layer for a few to hundreds of rows, with about as many tiles as the device has SMs.

`tiled_linear` computes y = x W^T + bias, or silu(gate) * up of it in the same launch. `split_k_linear` is for weights
with few output rows: it divides K among up to four programs per tile and returns their float32 partial sums, which
`add_rms_norm` or `add_partial_sums` add to the residual.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.few_rows import load_step
from nanovllm.kernels.linear.one_row import weight_rows
from nanovllm.kernels.linear.prefetch import prefetch

MAX_ROWS = 256
MAX_SPLITS = 4


@dataclass(frozen=True)
class Tile:
    block_m: int  # rows of x
    block_n: int  # rows of the weight
    block_k: int
    weight_left: bool = False  # compute W x^T: wgmma takes 64 rows on the left, which few rows of x would not fill
    num_warps: int = 4

    def stage_bytes(self, x_size: int, weight_size: int) -> int:
        """Shared memory of one pipeline stage. Sizes are bytes per item."""
        return (self.block_m * x_size + self.block_n * weight_size) * self.block_k

    def converted_bytes(self, x_size: int, weight_size: int) -> int:
        """Shared memory for an int8 weight tile converted to x's type; a left operand stays in registers."""
        return 0 if weight_size == x_size or self.weight_left else self.block_n * self.block_k * x_size


def _tile(m: int, num_weight_rows: int, *, gated: bool, split_k: bool) -> Tile:
    """The tiles that measured fastest on an H200 among a layer's other kernels."""
    if m <= 16:
        return Tile(16, 64, 128, weight_left=True)
    if m <= 32:
        return Tile(32, 64, 128, weight_left=True)
    if m <= 64:
        return Tile(64, _block_n(num_weight_rows, MAX_SPLITS if split_k else 1), 128)
    if m <= 128 and gated:
        return Tile(128, 64, 64, weight_left=True)
    if m <= 128:
        # two row blocks with two splits each
        return Tile(64, _block_n(num_weight_rows, 4), 128) if split_k else Tile(64, 64, 64)
    if gated:
        return Tile(128, 128, 64, weight_left=True, num_warps=8)
    return Tile(128, 32 if split_k else 64, 64)


def _block_n(num_weight_rows: int, programs_each: int) -> int:
    """64 weight rows per tile, or 32 if 64 would leave half of the SMs without a program."""
    return 64 if cdiv(num_weight_rows, 64) * programs_each > num_sms() // 2 else 32


@cache
def _device_limits() -> tuple[int, int]:  # number of SMs, bytes of shared memory per program
    if not torch.cuda.is_available():
        return 1, 1 << 20
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def num_sms() -> int:
    return _device_limits()[0]


@triton.jit
def _add_product(y, a, w, WEIGHT_LEFT: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a, w = a.to(tl.float32), w.to(tl.float32)
    elif w.dtype == tl.int8:
        w = w.to(a.dtype)
    if WEIGHT_LEFT:
        return tl.dot(w, tl.trans(a), y)
    else:
        return tl.dot(a, tl.trans(w), y)


@triton.jit
def _silu_and_mul(y, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, WEIGHT_LEFT: tl.constexpr):
    if WEIGHT_LEFT:
        gate, up = tl.split(tl.permute(tl.reshape(y, (WIDTH // 8, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (WIDTH, BLOCK_M)), tl.reshape(up, (WIDTH, BLOCK_M))
    else:
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, WIDTH, 2)))
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["M"])
def _tiled_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    M,
    N,  # columns of `out`
    x_stride,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: tl.constexpr = SPLITS * BLOCK_K  # columns that all splits cover in one iteration
    SLICE: tl.constexpr = (K + STEP - 1) // STEP * BLOCK_K  # columns of one split
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_n = tl.program_id(0) * WIDTH
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    # One thread must hold a gate and its up: they are adjacent columns of the result, or rows eight apart.
    if GATED and WEIGHT_LEFT:
        w_rows = tl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
    else:
        w_rows = weight_rows(j, first_n, N, GATED)
    k = split * SLICE + tl.arange(0, BLOCK_K)[None, :]
    # Row indices past M wrap around instead of being masked or clamped: a mask costs time, and clamping would have many
    # programs read the same row and overload one slice of L2.
    x_pointers = x + (m % M)[:, None] * x_stride + k
    rows_of_weight = weight + w_rows.to(tl.int64)[:, None] * K
    w_pointers = rows_of_weight + k
    if WEIGHT_LEFT:
        y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        m, w_rows = m[None, :], w_rows[:, None]
        n = first_n + tl.arange(0, WIDTH)[:, None]
    else:
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        m, w_rows = m[:, None], w_rows[None, :]
        n = first_n + tl.arange(0, WIDTH)[None, :]
    if PDL:
        # only the first two lines of every row: more would delay other programs' first lines
        LINE: tl.constexpr = 128 * 8 // weight.dtype.element_ty.primitive_bitwidth  # items
        prefetch(rows_of_weight + tl.minimum(split * SLICE + tl.arange(0, 2) * LINE, K - 1)[None, :])
        tl.extra.cuda.gdc_wait()
    for first in tl.range(0, SLICE, BLOCK_K, num_stages=STAGES):
        w = load_step(w_pointers, first, k, K, STEP)
        a = load_step(x_pointers, first, k, K, STEP)
        y = _add_product(y, a, w, WEIGHT_LEFT, WIDEN)
    if scale is not None:
        y *= tl.load(scale + w_rows)
    if bias is not None:
        y += tl.where(split == 0, tl.load(bias + w_rows).to(tl.float32), 0.0)
    if GATED:
        y = _silu_and_mul(y, BLOCK_M, WIDTH, WEIGHT_LEFT)
    offset = (split * M + m) * N + n
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=(m < M) & (n < N))


def tiled_linear(
    x: Tensor,  # [M, K] bfloat16 or float16, M <= MAX_ROWS
    weight: Tensor,  # [N, K] of x's type, or int8 with `scale`; gated: the gate rows, then the up rows
    bias: Tensor | None = None,  # [N]
    *,
    scale: Tensor | None = None,  # [N] float32: row n of an int8 weight stands for weight[n] * scale[n]
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    m, num_weight_rows = x.shape[0], weight.shape[0]
    assert m <= MAX_ROWS
    out = x.new_empty(m, num_weight_rows // 2 if gated else num_weight_rows)
    tile = _tile(m, num_weight_rows, gated=gated, split_k=False)
    _launch(x, weight, scale, bias, out, tile, splits=1, gated=gated, pdl=pdl)
    return out


def split_k_linear(
    x: Tensor,  # [M, K] bfloat16 or float16, M <= MAX_ROWS
    weight: Tensor,  # [N, K] of x's type, or int8 with `scale`
    bias: Tensor | None = None,  # [N]
    *,
    scale: Tensor | None = None,  # [N] float32
    pdl: bool = False,
) -> Tensor:  # [splits, M, N] float32
    (m, k), n = x.shape, weight.shape[0]
    assert m <= MAX_ROWS
    tile = _tile(m, n, gated=False, split_k=True)
    tiles = cdiv(n, tile.block_n) * cdiv(m, tile.block_m)
    splits = MAX_SPLITS
    while splits > 1 and (4 * tiles * splits > 5 * num_sms() or splits * tile.block_k > k):
        splits //= 2
    out = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, scale, bias, out, tile, splits=splits, gated=False, pdl=pdl)
    return out


def _num_stages(tile: Tile, num_programs: int, num_steps: int, x_size: int, weight_size: int) -> int:
    """As many pipeline stages as fit in shared memory; in half of it, if then two programs per SM hold all of them."""
    num_sms, shared_bytes = _device_limits()
    if num_sms < num_programs <= 2 * num_sms:
        shared_bytes = shared_bytes // 2 - 1024
    most = 8 if tile.block_k <= 64 else 6
    shared_bytes -= tile.converted_bytes(x_size, weight_size)
    return max(1, min(most, num_steps, shared_bytes // tile.stage_bytes(x_size, weight_size)))


def _launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    *,
    splits: int,
    gated: bool,
    pdl: bool,
) -> None:
    (m, k), num_weight_rows = x.shape, weight.shape[0]
    assert weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous() and x.dtype != torch.float32
    assert weight.dtype == (x.dtype if scale is None else torch.int8)
    grid = (cdiv(num_weight_rows, tile.block_n), cdiv(m, tile.block_m), splits)
    num_steps = cdiv(k, splits * tile.block_k)
    launch(
        _tiled_kernel,
        grid,
        x,
        weight,
        scale,
        bias,
        out,
        m,
        out.shape[-1],
        x.stride(0),
        K=k,
        SPLITS=splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=_num_stages(tile, grid[0] * grid[1] * splits, num_steps, x.element_size(), weight.element_size()),
        GATED=gated,
        WEIGHT_LEFT=tile.weight_left,
        WIDEN=not isinstance(_tiled_kernel, triton.JITFunction),  # the interpreter's dot does not support bfloat16
        PDL=pdl,
        num_warps=tile.num_warps,
        pdl=pdl,
    )
