"""A linear layer for thousands of rows on Hopper: y = x W^T, or silu(gate) * up of it in the same launch.

A persistent, warp-specialized kernel: one program per SM takes tile after tile. A producer warp loads blocks of x and W
with TMA into a ring of shared-memory stages; two consumer warpgroups multiply them with wgmma, 64 rows by 256 columns
each. A tile's activation and store run while the tensor cores multiply the first blocks of the next tile.

For the largest products the power limit lowers the clock, and energy per product matters most. There are then three
consumer warpgroups, so that each block of W serves 192 rows instead of 128. They have no registers left to keep a
finished tile and store it at once; the products of the other warpgroups hide that time. Smaller products have three
where that fills the GPU better (many_rows_tile.py).

Written in Gluon, Triton's lower-level language with explicit layouts and warp specialization, which Triton's compiler
does not offer on Hopper. Gluon has no interpreter: tests without a GPU only compile the kernel.
"""

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
from nanovllm.kernels.linear.many_rows_tile import GROUP_ROWS, TILE_OUTPUTS, num_groups
from nanovllm.kernels.linear.tiled import num_sms

ROWS = gl.constexpr(GROUP_ROWS)  # of x per consumer warpgroup
# of gate and of up per tile; not gated: of the left and of the right half of y
COLUMNS = gl.constexpr(TILE_OUTPUTS // 2)
BLOCK_K = gl.constexpr(64)
PIECE = gl.constexpr(64)  # columns per TMA store
NEIGHBOURS = gl.constexpr(8)  # row tiles that walk the column tiles together, so that W is read from L2
MIN_BLOCKS = 3  # K blocks per tile: the previous tile is stored while the first three are multiplied

X_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=2)
W_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=3)

# names of Triton 3.7 and later, or of 3.6
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def tile_place(tile, tiles_m, tiles_n):
    """The row and the column of a tile among all tiles, in an order that reuses W from L2."""
    first = tile // (NEIGHBOURS * tiles_n) * NEIGHBOURS
    size = gl.minimum(tiles_m - first, NEIGHBOURS)
    within = tile % (NEIGHBOURS * tiles_n)
    return first + within % size, within // size


@gluon.jit
def _tile_origin(tile, tiles_m, tiles_n, GROUPS: gl.constexpr):
    """The first row and column of a tile."""
    m, n = tile_place(tile, tiles_m, tiles_n)
    return m * (GROUPS * ROWS), n * COLUMNS


@gluon.jit
def _produce(x, w, xs, ws, full, empty, tiles_m, tiles_n, num_blocks):
    """The producer warp: load the K blocks of every tile of this program."""
    STAGES: gl.constexpr = full.shape[0]
    GROUPS: gl.constexpr = xs.shape[0] // STAGES
    # Block `it`, counted over all tiles, uses stage it % STAGES. The stage's `empty` barrier has completed it // STAGES
    # phases when all warpgroups have released its previous block. Waiting for parity 1 of a new barrier returns.
    it = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _tile_origin(tile, tiles_m, tiles_n, GROUPS)
        for block in range(num_blocks):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
            mbarrier.expect(full.index(slot), (GROUPS * ROWS + 2 * COLUMNS) * BLOCK_K * 2)
            for g in gl.static_range(GROUPS):
                at = [row + g * ROWS, block * BLOCK_K]
                _async_load(x, at, full.index(slot), xs.index(slot * GROUPS + g))
            _async_load(w, [0, column, block * BLOCK_K], full.index(slot), ws.index(slot))
            it += 1


@gluon.jit
def _halves(y):
    """Split into the left and the right half of the columns, without moving data between threads."""
    WIDTH: gl.constexpr = y.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(y, [y.shape[0], 2, WIDTH]), [0, 2, 1]))


@gluon.jit
def _begin_product(y, xs, ws, full, it, G: gl.constexpr):
    """Wait for block `it` and start its asynchronous product."""
    STAGES: gl.constexpr = full.shape[0]
    GROUPS: gl.constexpr = xs.shape[0] // STAGES
    slot = it % STAGES
    mbarrier.wait(full.index(slot), it // STAGES & 1)
    w = ws.index(slot).reshape([2 * COLUMNS, BLOCK_K])
    return warpgroup_mma(xs.index(slot * GROUPS + G), w.permute([1, 0]), y, is_async=True)


@gluon.jit
def _end_product(y, empty, it, PENDING: gl.constexpr):
    """Wait for the product of block `it`, with PENDING later products still running, and release its stage."""
    y = warpgroup_mma_wait(PENDING, deps=[y])
    _barrier()  # all four warps have waited
    mbarrier.arrive(empty.index(it % empty.shape[0]), count=1)
    return y


@gluon.jit
def silu(x):
    sigmoid = gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return x * sigmoid


@gluon.jit
def _put(out, staged, pairs, row, column, half, G: gl.constexpr, P: gl.constexpr, GATED: gl.constexpr):
    """Apply the activation to PIECE columns of a tile and store them.

    `pairs` holds two bfloat16 per int32: gate (or left column) in the lower half, up (or right column) in the upper.
    """
    left = (pairs << 16).to(gl.float32, bitcast=True)
    right = (pairs & -65536).to(gl.float32, bitcast=True)
    column += P * PIECE
    if GATED:
        buffer = staged.index(2 * G + P)
        tma.store_wait(1)  # the previous tile's store from this buffer has finished reading
        _barrier()
        buffer.store((silu(left) * right).to(gl.bfloat16))
        fence_async_shared()
        _barrier()
        _async_store(out, [row, column], buffer)
    else:
        tma.store_wait(0)
        _barrier()
        staged.index(2 * G).store(left.to(gl.bfloat16))
        staged.index(2 * G + 1).store(right.to(gl.bfloat16))
        fence_async_shared()
        _barrier()
        _async_store(out, [row, column], staged.index(2 * G))
        _async_store(out, [row, half + column], staged.index(2 * G + 1))


@gluon.jit
def _put_tile(out, staged, pairs, row, column, half, G: gl.constexpr, GATED: gl.constexpr):
    pairs1, pairs2 = _halves(pairs)
    _put(out, staged, pairs1, row, column, half, G, 0, GATED)
    _put(out, staged, pairs2, row, column, half, G, 1, GATED)


@gluon.jit
def _multiply(
    out,
    xs,
    ws,
    staged,
    full,
    empty,
    half,
    tiles_m,
    tiles_n,
    num_blocks,
    G: gl.constexpr,
    GATED: gl.constexpr,
):
    """Consumer warpgroup G: multiply and store its rows of every tile of this program."""
    GROUPS: gl.constexpr = staged.shape[0] // 2
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16]) if GROUPS == 2 else NARROW
    pairs = gl.zeros([ROWS, COLUMNS], gl.int32, NARROW)  # the previous tile, two bfloat16 per int32
    row, column = half * 0, half * 0
    it = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        y = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, WIDE)
        y = _begin_product(y, xs, ws, full, it, G)
        y = _begin_product(y, xs, ws, full, it + 1, G)
        pairs1, pairs2 = _halves(pairs)
        if GROUPS == 2 and it > 0:  # a branch, so that the compiler does not move it before the products
            _put(out, staged, pairs1, row, column, half, G, 0, GATED)
        y = _end_product(y, empty, it, 1)
        y = _begin_product(y, xs, ws, full, it + 2, G)
        if GROUPS == 2 and it > 0:
            _put(out, staged, pairs2, row, column, half, G, 1, GATED)
        y = _end_product(y, empty, it + 1, 1)
        for block in range(3, num_blocks):
            y = _begin_product(y, xs, ws, full, it + block, G)
            y = _end_product(y, empty, it + block - 1, 1)
        y = _end_product(y, empty, it + num_blocks - 1, 0)
        it += num_blocks
        row, column = _tile_origin(tile, tiles_m, tiles_n, GROUPS)
        row += G * ROWS
        left, right = _halves(y)
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1
        )
        pairs = gl.convert_layout(pairs, NARROW, assert_trivial=True)
        if GROUPS == 3:
            _put_tile(out, staged, pairs, row, column, half, G, GATED)
    if GROUPS == 2:
        _put_tile(out, staged, pairs, row, column, half, G, GATED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "num_blocks"])
def _many_rows_kernel(x, w, out, M, half, num_blocks, GATED: gl.constexpr, GROUPS: gl.constexpr):
    STAGES: gl.constexpr = 6 - GROUPS  # as many as fit in shared memory
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, BLOCK_K], x.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, COLUMNS, BLOCK_K], w.layout)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2 * GROUPS, ROWS, PIECE], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    fence_async_shared()
    _barrier()
    tiles_m = (M + GROUPS * ROWS - 1) // (GROUPS * ROWS)
    tiles_n = half // COLUMNS
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (out, xs, ws, staged, full, empty, half, tiles_m, tiles_n, num_blocks, 0, GATED)),
                (_multiply, (out, xs, ws, staged, full, empty, half, tiles_m, tiles_n, num_blocks, 1, GATED)),
                (_produce, (x, w, xs, ws, full, empty, tiles_m, tiles_n, num_blocks)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (out, xs, ws, staged, full, empty, half, tiles_m, tiles_n, num_blocks, 0, GATED)),
                (_multiply, (out, xs, ws, staged, full, empty, half, tiles_m, tiles_n, num_blocks, 1, GATED)),
                (_multiply, (out, xs, ws, staged, full, empty, half, tiles_m, tiles_n, num_blocks, 2, GATED)),
                (_produce, (x, w, xs, ws, full, empty, tiles_m, tiles_n, num_blocks)),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[160, 160, 24],
        )


def many_rows_serves(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel supports this weight: bfloat16, no bias, whole tiles, and at least MIN_BLOCKS blocks of K."""
    num_outputs, num_inputs = weight.shape
    if weight.dtype != torch.bfloat16 or bias is not None:
        return False
    num_blocks, rest = divmod(num_inputs, BLOCK_K.value)
    return num_outputs % (2 * COLUMNS.value) == 0 and rest == 0 and num_blocks >= MIN_BLOCKS


def many_rows_linear(
    x: Tensor,  # [M, K] bfloat16
    weight: Tensor,  # [N, K]; gated: the gate rows, then the up rows
    *,
    gated: bool = False,
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    (m, k), half = x.shape, weight.shape[0] // 2
    assert many_rows_serves(weight, None) and x.stride(1) == 1 and weight.is_contiguous()
    out = x.new_empty(m, half if gated else 2 * half)
    groups = num_groups(m, 2 * half, k, gated=gated)
    tiles = cdiv(m, groups * ROWS.value) * (half // COLUMNS.value)
    launch(
        _many_rows_kernel,
        (min(num_sms(), tiles),),
        TensorDescriptor(x, [m, k], list(x.stride()), [ROWS.value, BLOCK_K.value], X_LAYOUT),
        TensorDescriptor(weight, [2, half, k], [half * k, k, 1], [2, COLUMNS.value, BLOCK_K.value], W_LAYOUT),
        TensorDescriptor(out, list(out.shape), [out.shape[1], 1], [ROWS.value, PIECE.value], X_LAYOUT),
        m,
        half,
        k // BLOCK_K.value,
        GATED=gated,
        GROUPS=groups,
        num_warps=4,
    )
    return out
