"""A linear layer for tens of rows of a narrow model: y = x W^T in tiles, so few that each may have an SM of its own.

Gated it gives silu(gate) * up in the same launch. In parts it gives sums over slices of x and W, for more programs than
there are tiles; `add_rms_norm` adds them up.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels import launch
from nanovllm.kernels.few_rows_linear import load_step

MAX_ROWS = 128
MAX_ROWS_IN_PARTS = 256
MAX_PARTS = 4


@dataclass(frozen=True)
class Tile:
    block_m: int  # rows of x
    block_n: int  # rows of the weight
    block_k: int
    num_stages: int
    weight_left: bool = False  # tensor cores take 64 rows on the left: the weight's, where that needs fewer steps


def _tile(m: int, *, gated: bool, in_parts: bool) -> Tile:
    """What measured best on an H200."""
    if m <= 16:
        return Tile(16, 128, 128, 5 if in_parts else 4, weight_left=True)
    if m <= 32:
        return Tile(32, 64, 128, 5, weight_left=True)
    if m <= 64:
        return Tile(64, 64, 128, 5) if gated else Tile(64, 32, 128, 5) if in_parts else Tile(64, 32, 64, 8)
    if m <= 128:
        return Tile(128, 64, 64, 8, weight_left=True) if gated else Tile(64, 64, 64, 8)
    return Tile(64, 128, 64, 8)


@cache
def _device_limits() -> tuple[int, int]:  # SMs, bytes of shared memory a program may have
    if not torch.cuda.is_available():
        return 1, 1 << 20
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return properties["multiprocessor_count"], properties["max_shared_mem"]


@triton.jit
def _add_product(y, a, w, WEIGHT_LEFT: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a, w = a.to(tl.float32), w.to(tl.float32)
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
    bias,
    out,
    M,
    N,  # columns of `out`
    x_stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
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
    STEP: tl.constexpr = PARTS * BLOCK_K  # of all parts together
    SLICE: tl.constexpr = (K + STEP - 1) // STEP * BLOCK_K  # of x and W, for a part
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_n = tl.program_id(0) * WIDTH
    part = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    # a gate and its up are in the same thread's hands: columns side by side, or rows eight apart
    if GATED and WEIGHT_LEFT:
        w_rows = tl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
    elif GATED:
        w_rows = tl.minimum(first_n + j // 2, N - 1) + j % 2 * N
    else:
        w_rows = tl.minimum(first_n + j, N - 1)
    k = part * SLICE + tl.arange(0, BLOCK_K)[None, :]
    # past the end come other rows again: one row for them all would keep a corner of L2 busy, and masks cost time
    x_pointers = x + (m % M)[:, None] * x_stride + k
    w_pointers = weight + w_rows.to(tl.int64)[:, None] * K + k
    if WEIGHT_LEFT:
        y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        m, w_rows = m[None, :], w_rows[:, None]
        n = first_n + tl.arange(0, WIDTH)[:, None]
    else:
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        m, w_rows = m[:, None], w_rows[None, :]
        n = first_n + tl.arange(0, WIDTH)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in tl.range(0, SLICE, BLOCK_K, num_stages=STAGES):
        w = load_step(w_pointers, first, k, K, STEP)
        a = load_step(x_pointers, first, k, K, STEP)
        y = _add_product(y, a, w, WEIGHT_LEFT, WIDEN)
    if bias is not None:
        y += tl.where(part == 0, tl.load(bias + w_rows).to(tl.float32), 0.0)
    if GATED:
        y = _silu_and_mul(y, BLOCK_M, WIDTH, WEIGHT_LEFT)
    place = (part * M + m) * N + n
    tl.store(out + place, y.to(out.dtype.element_ty), mask=(m < M) & (n < N))


def tiled_linear(
    x: Tensor,  # [M, K] bfloat16 or float16, M <= MAX_ROWS
    weight: Tensor,  # [N, K]; gated: the gates' rows, then the ups'
    bias: Tensor | None = None,  # [N]
    *,
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    m, num_weight_rows = x.shape[0], weight.shape[0]
    assert m <= MAX_ROWS
    out = x.new_empty(m, num_weight_rows // 2 if gated else num_weight_rows)
    _launch(x, weight, bias, out, _tile(m, gated=gated, in_parts=False), parts=1, gated=gated, pdl=pdl)
    return out


def linear_in_parts(
    x: Tensor,  # [M, K] bfloat16 or float16, M <= MAX_ROWS_IN_PARTS
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    pdl: bool = False,
) -> Tensor:  # [parts, M, N] float32
    (m, k), n = x.shape, weight.shape[0]
    assert m <= MAX_ROWS_IN_PARTS
    tile = _tile(m, gated=False, in_parts=True)
    tiles = triton.cdiv(n, tile.block_n) * triton.cdiv(m, tile.block_m)
    parts = MAX_PARTS
    while parts > 1 and (tiles * parts > _device_limits()[0] or parts * tile.block_k > k):
        parts //= 2
    out = torch.empty(parts, m, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, tile, parts=parts, gated=False, pdl=pdl)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile, *, parts: int, gated: bool, pdl: bool
) -> None:
    (m, k), num_weight_rows = x.shape, weight.shape[0]
    assert weight.shape[1] == k and x.stride(1) == 1 and weight.is_contiguous() and x.dtype != torch.float32
    stage_bytes = (tile.block_m + tile.block_n) * tile.block_k * x.element_size()
    num_steps = triton.cdiv(k, parts * tile.block_k)
    launch(
        _tiled_kernel,
        (triton.cdiv(num_weight_rows, tile.block_n), triton.cdiv(m, tile.block_m), parts),
        x,
        weight,
        bias,
        out,
        m,
        out.shape[-1],
        x.stride(0),
        K=k,
        PARTS=parts,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=min(tile.num_stages, num_steps, _device_limits()[1] // stage_bytes),
        GATED=gated,
        WEIGHT_LEFT=tile.weight_left,
        WIDEN=not isinstance(_tiled_kernel, triton.JITFunction),  # the interpreter's dot does not know bfloat16
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
