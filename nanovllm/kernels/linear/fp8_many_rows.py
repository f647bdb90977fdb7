"""Products of fp8 weights with inputs rounded to fp8 (W8A8) for thousands of rows on Hopper: y = x W^T + bias, or
silu(gate) * up of it in the same launch.

A persistent, warp-specialized Gluon kernel like many_rows.py: a producer warp loads blocks of 128 columns of x and W
with TMA into a ring of shared-memory stages, and three consumer warpgroups multiply them with wgmma, 64 rows by 128
columns each. The tensor cores add fp8 products with about 14 bits. So the sums of one block of columns are added to
float32 sums in other registers, and are multiplied with the block's scales there if weight and inputs have one per 128
columns. The other warpgroups multiply in the meantime.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.fp8_inputs import round_inputs
from nanovllm.kernels.linear.many_rows import _async_load, _async_store, _barrier, _halves, silu, tile_place
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.tiled import num_sms

ROWS = gl.constexpr(64)  # of x per consumer warpgroup
GROUPS = gl.constexpr(3)  # consumer warpgroups
COLUMNS = gl.constexpr(64)  # of gate and of up per tile; not gated: of the left and of the right half of y
BLOCK_K = gl.constexpr(128)
STAGES = gl.constexpr(5)

CODES = gl.NVMMASharedLayout(128, 8, rank=2)
W_CODES = gl.NVMMASharedLayout(128, 8, rank=3)
OUT = gl.NVMMASharedLayout(128, 16, rank=2)


@gluon.jit
def _tile_origin(tile, tiles_m, tiles_n):
    """The first row and column of a tile."""
    m, n = tile_place(tile, tiles_m, tiles_n)
    return m * (GROUPS * ROWS), n * COLUMNS


@gluon.jit
def _produce(x, w, xs, ws, full, empty, tiles_m, tiles_n, num_blocks):
    """The producer warp: load the K blocks of every tile of this program."""
    it = 0  # as in many_rows.py
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _tile_origin(tile, tiles_m, tiles_n)
        for block in range(num_blocks):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
            mbarrier.expect(full.index(slot), (GROUPS * ROWS + 2 * COLUMNS) * BLOCK_K)
            for g in gl.static_range(GROUPS):
                _async_load(x, [row + g * ROWS, block * BLOCK_K], full.index(slot), xs.index(slot * GROUPS + g))
            _async_load(w, [0, column, block * BLOCK_K], full.index(slot), ws.index(slot))
            it += 1


@gluon.jit
def _product(xs, ws, slot, G: gl.constexpr):
    """The sums of one block of columns: of the left and of the right columns."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 32])
    w = ws.index(slot).reshape([2 * COLUMNS, BLOCK_K]).permute([1, 0])
    sums = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, LAYOUT)
    sums = warpgroup_mma(xs.index(slot * GROUPS + G), w, sums, use_acc=False, is_async=True)
    return _halves(warpgroup_mma_wait(0, deps=[sums]))


@gluon.jit
def _put(
    out, staged, left, right, x_scale, w_scale, bias, row, column, half,
    G: gl.constexpr, GATED: gl.constexpr, BLOCKED: gl.constexpr,
):  # fmt: skip
    """Store ROWS rows of a tile, after scales, bias and activation."""
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, left.type.layout))
    if not BLOCKED:
        s = gl.load(x_scale + row + gl.arange(0, ROWS, gl.SliceLayout(1, left.type.layout)))[:, None]
        left *= s * gl.load(w_scale + columns)[None, :]
        right *= s * gl.load(w_scale + half + columns)[None, :]
    if bias is not None:
        left += gl.load(bias + columns).to(gl.float32)[None, :]
        right += gl.load(bias + half + columns).to(gl.float32)[None, :]
    if GATED:
        _store(out, staged.index(G), silu(left) * right, row, column)
    else:
        _store(out, staged.index(G), left, row, column)
        _store(out, staged.index(G), right, row, half + column)


@gluon.jit
def _store(out, buffer, y, row, column):
    tma.store_wait(0)  # the previous store has finished reading the buffer
    _barrier()
    buffer.store(y.to(buffer.dtype))
    fence_async_shared()
    _barrier()
    _async_store(out, [row, column], buffer)


@gluon.jit
def _multiply(
    G: gl.constexpr, SCALE_ROWS: gl.constexpr, GATED: gl.constexpr, BLOCKED: gl.constexpr, bias,
    out, x_scale, w_scale, xs, ws, staged, full, empty, x_scale_stride, half, tiles_m, tiles_n, num_blocks,
):  # fmt: skip
    """Consumer warpgroup G: multiply and store its rows of every tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    it = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _tile_origin(tile, tiles_m, tiles_n)
        row += G * ROWS
        left = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
        right = left
        scale = x_scale + row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        scale_left = w_scale + column // SCALE_ROWS * num_blocks
        scale_right = w_scale + (half + column) // SCALE_ROWS * num_blocks
        if BLOCKED:
            s = gl.load(scale)
            factor_left, factor_right = s * gl.load(scale_left), s * gl.load(scale_right)
        for block in range(num_blocks):
            if BLOCKED:  # load the scales of the next block while this one is multiplied
                ahead = gl.minimum(block + 1, num_blocks - 1)
                s, s_left, s_right = (
                    gl.load(scale + ahead * x_scale_stride),
                    gl.load(scale_left + ahead),
                    gl.load(scale_right + ahead),
                )
            slot = it % STAGES
            mbarrier.wait(full.index(slot), it // STAGES & 1)
            sums_left, sums_right = _product(xs, ws, slot, G)
            _barrier()  # all four warps have waited
            mbarrier.arrive(empty.index(slot), count=1)
            sums_left = gl.convert_layout(sums_left, LAYOUT, assert_trivial=True)
            sums_right = gl.convert_layout(sums_right, LAYOUT, assert_trivial=True)
            if BLOCKED:
                left += sums_left * factor_left[:, None]
                right += sums_right * factor_right[:, None]
                factor_left, factor_right = s * s_left, s * s_right
            else:
                left += sums_left
                right += sums_right
            it += 1
        _put(out, staged, left, right, x_scale, w_scale, bias, row, column, half, G, GATED, BLOCKED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "num_blocks"])
def _fp8_many_rows_kernel(
    x, w, out, x_scale, w_scale, bias, M, x_scale_stride, half, num_blocks,
    SCALE_ROWS: gl.constexpr, GATED: gl.constexpr, BLOCKED: gl.constexpr,
):  # fmt: skip
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS, ROWS, BLOCK_K], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, 2, COLUMNS, BLOCK_K], w.layout)
    staged = gl.allocate_shared_memory(out.dtype, [GROUPS, ROWS, COLUMNS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    fence_async_shared()
    _barrier()
    tiles_m = (M + GROUPS * ROWS - 1) // (GROUPS * ROWS)
    tiles_n = half // COLUMNS
    sizes = (tiles_m, tiles_n, num_blocks)
    rest = (out, x_scale, w_scale, xs, ws, staged, full, empty, x_scale_stride, half) + sizes
    gl.warp_specialize(
        [
            (_multiply, (0, SCALE_ROWS, GATED, BLOCKED, bias) + rest),
            (_multiply, (1, SCALE_ROWS, GATED, BLOCKED, bias) + rest),
            (_multiply, (2, SCALE_ROWS, GATED, BLOCKED, bias) + rest),
            (_produce, (x, w, xs, ws, full, empty) + sizes),
        ],
        worker_num_warps=[4, 4, 1],
        worker_num_regs=[160, 160, 24],
    )


def fp8_many_rows_linear(
    x: Tensor,  # [M, K], 16 bits
    weight: PackedWords,  # [N, K] fp8; gated: the gate rows, then the up rows
    bias: Tensor | None = None,  # [N]
    *,
    gated: bool = False,
    **norm: Any,  # before the product: see `round_inputs`
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    (m, k), half, groups = x.shape, weight.shape[0] // 2, weight.scale.shape[-1]
    rows = cdiv(m, GROUPS.value * ROWS.value) * (GROUPS.value * ROWS.value)  # as `padded_rows` of fp8_some_rows.py
    codes, x_scale = round_inputs(x, groups, weight.distance, rows=rows, **norm)
    out = x.new_empty(m, half if gated else 2 * half)
    w = weight.words.view(torch.float8_e4m3fn)
    launch(
        _fp8_many_rows_kernel,
        (min(num_sms(), cdiv(m, GROUPS.value * ROWS.value) * (half // COLUMNS.value)),),
        TensorDescriptor(codes, [rows, k], [k, 1], [ROWS.value, BLOCK_K.value], CODES),
        TensorDescriptor(w, [2, half, k], [half * k, k, 1], [2, COLUMNS.value, BLOCK_K.value], W_CODES),
        TensorDescriptor(out, list(out.shape), [out.shape[1], 1], [ROWS.value, COLUMNS.value], OUT),
        x_scale,
        weight.scale,
        bias,
        m,
        x_scale.stride(0),
        half,
        k // BLOCK_K.value,
        SCALE_ROWS=weight.scale_rows,
        GATED=gated,
        BLOCKED=groups > 1,
        num_warps=4,
    )
    return out
