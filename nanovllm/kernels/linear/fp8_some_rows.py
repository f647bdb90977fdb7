"""Products of fp8 weights with inputs rounded to fp8 (W8A8) for one to hundreds of rows on Hopper: y = x W^T + bias,
or silu(gate) * up of it in the same launch, or float32 partial sums of y with K divided among programs.

Reading the weight takes most of the time. A producer warp keeps a ring of shared-memory stages full with TMA, and
begins before the preceding kernel has written the inputs. The weight is the left operand of wgmma (W x^T), which has
64 rows, and the rows of x are the right one: each consumer warpgroup multiplies 64 rows of the weight with all rows of
x of a tile, in pieces where their number is no power of two. Sums of 128 columns are added in float32, because the
tensor cores add fp8 products with fewer bits. Where weight and inputs have a scale per 128 columns, those sums are
multiplied with it; the scales of x are loaded with its codes.

Gluon has no interpreter: tests without a GPU only compile the kernel.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
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
from nanovllm.kernels.linear.fp8_inputs import RoundedInputs, round_inputs
from nanovllm.kernels.linear.many_rows import _async_load, _async_store, _barrier, silu
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.tiled import _device_limits, num_sms
from nanovllm.kernels.select import EIGHT_ROWS, FEW_ROWS, MANY_OUTPUTS, SOME_ROWS, TENS_OF_ROWS

W_ROWS = gl.constexpr(64)  # of the weight per consumer warpgroup
BLOCK_K = gl.constexpr(128)
MAX_SPLITS = 4  # of K
ALIGNED_SCALES = gl.constexpr(32)  # 128 bytes: TMA loads write to multiples of it
OTHER_BYTES = 512  # of shared memory: barriers, and what warps are started with

X_CODES = gl.NVMMASharedLayout(128, 8, rank=2)
W_CODES = gl.NVMMASharedLayout(128, 8, rank=4)
X_SCALES = gl.NVMMASharedLayout(0, 32, rank=2)


@dataclass(frozen=True)
class Fp8Tile:
    x_rows: int
    groups: int  # consumer warpgroups, 1 to 3: a tile has 64 rows of the weight for each
    splits: int = 1  # of K

    @property
    def piece(self) -> int:
        """Rows of x that are multiplied at once: a power of two whose sums fit in registers."""
        return min(self.x_rows & -self.x_rows, 128)


X_ROWS = (8, 16, 32, 64, 128)  # of tiles
THREE_PIECES = 192  # rows of a tile that reads the weight once where those above would read it twice
# what bench/packed_kernels.py measures
FP8_TILES = tuple(
    Fp8Tile(rows, groups, splits) for rows in (*X_ROWS, THREE_PIECES) for groups in (1, 2, 3) for splits in (1, 2, 4)
)


def some_rows_tile(m: int, n: int, k: int, *, split: bool, blocked: bool) -> Fp8Tile:
    """With a scale per row, within 5 % of the fastest of those that were measured at 8, 16, 32, 64, 128, 192 and 256
    rows of Qwen3-8B's linears on an H200. With a scale per block, 128 rows of x leave no registers for a third
    warpgroup."""
    x_rows = next((rows for rows in X_ROWS if m <= rows), X_ROWS[-1])
    three_pieces = x_rows < m <= THREE_PIECES and not blocked
    if split:
        if three_pieces and n < k and cdiv(n, 2 * W_ROWS.value) * MAX_SPLITS <= num_sms():
            return Fp8Tile(THREE_PIECES, 2, MAX_SPLITS)
        two_tiles = TENS_OF_ROWS < m <= 2 * TENS_OF_ROWS and n >= k and not blocked
        if two_tiles and 2 * cdiv(n, 2 * W_ROWS.value) * (MAX_SPLITS // 2) <= num_sms():
            return Fp8Tile(TENS_OF_ROWS, 2, MAX_SPLITS // 2)
        # few rows and long inputs: smaller tiles, if each has a multiprocessor
        few = m <= FEW_ROWS and n < k and not blocked and cdiv(n, 2 * W_ROWS.value) * MAX_SPLITS <= num_sms()
        tens = SOME_ROWS < m <= TENS_OF_ROWS and not blocked
        groups = 2 if few or tens or m > TENS_OF_ROWS else 3
        splits = MAX_SPLITS // 2 if tens and n >= k else MAX_SPLITS  # sums of many rows take long to write and to add
        while splits > 1 and cdiv(m, x_rows) * cdiv(n, groups * W_ROWS.value) * splits > num_sms():
            splits //= 2
        return Fp8Tile(x_rows, groups, splits)
    if n >= MANY_OUTPUTS:
        if three_pieces:
            return Fp8Tile(THREE_PIECES, 3)
        return Fp8Tile(x_rows, 2 if blocked and m > 64 else 3)
    if EIGHT_ROWS <= m <= FEW_ROWS and not blocked and cdiv(n, W_ROWS.value) <= num_sms():
        return Fp8Tile(x_rows, 1)
    return Fp8Tile(min(x_rows, 64), 3 if m > 128 else 2)  # few columns: smaller tiles, for more programs


def padded_rows(m: int, tile: Fp8Tile) -> int:
    """How many rows to allocate for the inputs' codes: whole tiles, because TMA is slow for rows past a tensor's end.
    Up to FEW_ROWS this does not matter."""
    return m if m <= FEW_ROWS else cdiv(m, tile.x_rows) * tile.x_rows


@gluon.jit
def _tile_origin(tile, tiles_m, tiles_n, num_blocks, X_ROWS: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr):
    """The first row of x, the first row of the weight in units of 16, the split, and its first block and last block."""
    split = tile // (tiles_m * tiles_n)
    n = tile // tiles_m % tiles_n * GROUPS * (W_ROWS // 16)
    return tile % tiles_m * X_ROWS, n, split, num_blocks * split // SPLITS, num_blocks * (split + 1) // SPLITS


@gluon.jit
def _load_weight(w, ws, full, slot, n, block, GROUPS: gl.constexpr, X_ROWS: gl.constexpr, BLOCKED: gl.constexpr):
    mbarrier.expect(full.index(slot), (GROUPS * W_ROWS + X_ROWS) * BLOCK_K + (4 * X_ROWS if BLOCKED else 0))
    for g in gl.static_range(GROUPS):
        at = [n + g * (W_ROWS // 16), 0, 0, block * BLOCK_K]
        _async_load(w, at, full.index(slot), ws.index(slot * GROUPS + g))


@gluon.jit
def _load_inputs(x, x_scale, xs, ss, full, slot, m, block, BLOCKED: gl.constexpr):
    PIECES: gl.constexpr = xs.shape[0] // full.shape[0]
    for p in gl.static_range(PIECES):
        at = [m + p * xs.shape[1], block * BLOCK_K]
        _async_load(x, at, full.index(slot), xs.index(slot * PIECES + p))
    if BLOCKED:
        _async_load(x_scale, [block, m], full.index(slot), ss.index(slot * (ss.shape[0] // full.shape[0])))


@gluon.jit
def _produce(
    GROUPS: gl.constexpr, SPLITS: gl.constexpr, BLOCKED: gl.constexpr, PDL: gl.constexpr,
    x, w, x_scale, xs, ws, ss, full, empty, tiles, tiles_m, tiles_n, num_blocks,
):  # fmt: skip
    """The producer warp: load the K blocks of every tile of this program."""
    STAGES: gl.constexpr = full.shape[0]
    X_ROWS: gl.constexpr = xs.shape[0] // STAGES * xs.shape[1]
    tile = gl.program_id(0)
    m, n, split, first, last = _tile_origin(tile, tiles_m, tiles_n, num_blocks, X_ROWS, GROUPS, SPLITS)
    # the weight does not depend on the preceding kernel: fill the ring with it before waiting for the inputs
    ahead = gl.minimum(last - first, STAGES)
    for it in range(ahead):
        _load_weight(w, ws, full, it, n, first + it, GROUPS, X_ROWS, BLOCKED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for it in range(ahead):
        _load_inputs(x, x_scale, xs, ss, full, it, m, first + it, BLOCKED)
    first += ahead
    it = ahead  # blocks are counted over all tiles, as in many_rows.py
    while tile < tiles:
        for block in range(first, last):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), (it // STAGES + 1) & 1)
            if xs.shape[0] // STAGES > 2:
                _barrier()  # four warps wait here, of which one loads: none may fall behind by a round
            _load_weight(w, ws, full, slot, n, block, GROUPS, X_ROWS, BLOCKED)
            _load_inputs(x, x_scale, xs, ss, full, slot, m, block, BLOCKED)
            it += 1
        tile += gl.num_programs(0)
        m, n, split, first, last = _tile_origin(tile, tiles_m, tiles_n, num_blocks, X_ROWS, GROUPS, SPLITS)


@gluon.jit
def _product(xs, ws, ss, full, it, p: gl.constexpr, G: gl.constexpr, GROUPS: gl.constexpr, BLOCKED: gl.constexpr):
    """The sums of block `it` for a piece of the rows of x, and the block's scales of them if BLOCKED."""
    STAGES: gl.constexpr = full.shape[0]
    PIECE: gl.constexpr = xs.shape[1]
    PIECES: gl.constexpr = xs.shape[0] // STAGES
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 32])
    slot = it % STAGES
    w = ws.index(slot * GROUPS + G).reshape([W_ROWS, BLOCK_K])
    sums = gl.zeros([W_ROWS, PIECE], gl.float32, LAYOUT)
    sums = warpgroup_mma(w, xs.index(slot * PIECES + p).permute([1, 0]), sums, use_acc=False, is_async=True)
    s_x = ss.index(slot * (ss.shape[0] // STAGES)).load(LAYOUT) if BLOCKED else 0.0
    return warpgroup_mma_wait(0, deps=[sums]), s_x


@gluon.jit
def _row_halves(y):
    """Rows 0 to 7 and rows 8 to 15 of every 16 rows, which a thread has both of."""
    ROWS: gl.constexpr = y.shape[0] // 16
    return gl.split(gl.permute(gl.reshape(y, [ROWS, 2, 8, y.shape[1]]), [0, 2, 3, 1]))


@gluon.jit
def _multiply(
    G: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr, SCALE_ROWS: gl.constexpr, GATED: gl.constexpr,
    BLOCKED: gl.constexpr, PDL: gl.constexpr, bias, x_scale, w_scale, out, xs, ws, ss, staged, full, empty, N,
    tiles, tiles_m, tiles_n, num_blocks,
):  # fmt: skip
    """Consumer warpgroup G: multiply and store its rows of the weight of every tile of this program."""
    STAGES: gl.constexpr = full.shape[0]
    PIECE: gl.constexpr = xs.shape[1]  # rows of x
    PIECES: gl.constexpr = xs.shape[0] // STAGES
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 32])
    WIDTH: gl.constexpr = staged.shape[3]  # columns of `out` per warpgroup
    j = gl.arange(0, W_ROWS, gl.SliceLayout(1, LAYOUT))
    if PDL:
        tl.extra.cuda.gdc_wait()
    it = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, n, split, first, last = _tile_origin(tile, tiles_m, tiles_n, num_blocks, PIECES * PIECE, GROUPS, SPLITS)
        column = (n + G * (W_ROWS // 16)) * (WIDTH * 16 // W_ROWS)
        if GATED:
            w_row = gl.minimum(column + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
        else:
            w_row = gl.minimum(column + j, N - 1)
        w_scales = w_scale + w_row // SCALE_ROWS * (num_blocks if BLOCKED else 1)
        x_scales = x_scale if BLOCKED else x_scale + row + gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))
        if not BLOCKED and PIECES <= 2:  # before the products, which hide how long they take to arrive
            s_w = gl.load(w_scales)
            if PIECE <= 16:  # more would take too many registers
                s_x = gl.load(x_scales)
        ys = ()  # type: tuple
        for _ in gl.static_range(PIECES):
            ys += (gl.zeros([W_ROWS, PIECE], gl.float32, LAYOUT),)
        for block in range(first, last):
            if BLOCKED:
                s_w = gl.load(w_scales + block)
            mbarrier.wait(full.index(it % STAGES), it // STAGES & 1)
            added = ()  # type: tuple
            for p in gl.static_range(PIECES):
                sums, block_scales = _product(xs, ws, ss, full, it, p, G, GROUPS, BLOCKED)
                if p == PIECES - 1:
                    _barrier()  # all four warps have waited
                    mbarrier.arrive(empty.index(it % STAGES), count=1)
                if BLOCKED:
                    added += (ys[p] + sums * s_w[:, None] * block_scales,)
                else:
                    added += (ys[p] + sums,)
            ys = added
            it += 1
        if not BLOCKED and PIECES > 2:  # later, because registers are short
            s_w = gl.load(w_scales)
        for p in gl.static_range(PIECES):
            y = ys[p]
            if not BLOCKED:
                if PIECE > 16:
                    s_x = gl.load(x_scales + p * PIECE)
                y *= s_w[:, None]
                y *= s_x[None, :]
            if bias is not None:
                y += gl.where(split == 0, gl.load(bias + w_row).to(gl.float32), 0.0)[:, None]
            if GATED:
                gate, up = _row_halves(y)
                y = gl.reshape(silu(gate) * up, [W_ROWS // 2, PIECE])
            tma.store_wait(0)  # the previous store has finished reading the buffer
            _barrier()
            staged.index(G).reshape([PIECE, WIDTH]).permute([1, 0]).store(y.to(out.dtype))
            fence_async_shared()
            _barrier()
            _async_store(out, [split, row + p * PIECE, column], staged.index(G))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "num_blocks", "tiles_n"])
def _fp8_some_rows_kernel(
    x, w, out, x_scale, w_scale, bias, M, N, num_blocks, tiles_n,
    PIECES: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, SCALE_ROWS: gl.constexpr,
    GATED: gl.constexpr, BLOCKED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PIECE: gl.constexpr = x.block_type.shape[0]
    X_ROWS: gl.constexpr = PIECES * PIECE
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * PIECES, PIECE, BLOCK_K], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES * GROUPS, W_ROWS // 16, 2, 8, BLOCK_K], w.layout)
    APART: gl.constexpr = ALIGNED_SCALES // PIECE if PIECE < ALIGNED_SCALES else 1  # the scales of two stages
    ss = gl.allocate_shared_memory(gl.float32, [STAGES * APART if BLOCKED else 1, 1, PIECE], X_SCALES)
    WIDTH: gl.constexpr = W_ROWS // 2 if GATED else W_ROWS
    staged = gl.allocate_shared_memory(out.dtype, [GROUPS, 1, PIECE, WIDTH], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    fence_async_shared()
    _barrier()
    tiles_m = (M + X_ROWS - 1) // X_ROWS
    tiles = tiles_m * tiles_n * SPLITS
    sizes = (tiles, tiles_m, tiles_n, num_blocks)
    rest = (x_scale, w_scale, out, xs, ws, ss, staged, full, empty, N) + sizes
    loads = (x, w, x_scale, xs, ws, ss, full, empty) + sizes
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (0, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
                (_produce, (GROUPS, SPLITS, BLOCKED, PDL) + loads),
            ],
            worker_num_warps=[1],
            worker_num_regs=[40],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
                (_multiply, (1, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
                (_produce, (GROUPS, SPLITS, BLOCKED, PDL) + loads),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[232, 40],
        )
    elif PIECES > 2:  # only the later ones can have so many registers
        gl.warp_specialize(
            [
                (_produce, (GROUPS, SPLITS, BLOCKED, PDL) + loads),
                (_multiply, (0, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
                (_multiply, (1, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
                (_multiply, (2, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
            ],
            worker_num_warps=[4, 4, 4],
            worker_num_regs=[152, 152, 152],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
                (_multiply, (1, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
                (_multiply, (2, GROUPS, SPLITS, SCALE_ROWS, GATED, BLOCKED, PDL, bias) + rest),
                (_produce, (GROUPS, SPLITS, BLOCKED, PDL) + loads),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[152, 152, 40],
        )


def fp8_some_rows_linear(
    x: Tensor,  # [M, K], 16 bits
    weight: PackedWords,  # [N, K] fp8; gated: the gate rows, then the up rows
    bias: Tensor | None = None,  # [N]
    *,
    gated: bool = False,
    pdl: bool = False,
    tile: Fp8Tile | None = None,
    **norm: Any,  # before the product: see `round_inputs`
) -> Tensor:  # [M, N], or [M, N / 2] if gated
    tile = tile or some_rows_tile(x.shape[0], *weight.shape, split=False, blocked=weight.scale.shape[-1] > 1)
    out = x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])
    groups, rows = weight.scale.shape[-1], padded_rows(x.shape[0], tile)
    rounded = round_inputs(x, groups, weight.distance, rows=rows, pdl=pdl, **norm)
    _launch(rounded, weight, bias, out, tile, gated=gated, pdl=pdl)
    return out


def fp8_some_rows_split_k_linear(
    x: Tensor,  # [M, K], 16 bits
    weight: PackedWords,  # [N, K] fp8
    bias: Tensor | None = None,  # [N]
    *,
    pdl: bool = False,
    tile: Fp8Tile | None = None,
) -> Tensor:  # [splits, M, N] float32
    tile = tile or some_rows_tile(x.shape[0], *weight.shape, split=True, blocked=weight.scale.shape[-1] > 1)
    out = torch.empty(tile.splits, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    rounded = round_inputs(x, weight.scale.shape[-1], weight.distance, rows=padded_rows(x.shape[0], tile), pdl=pdl)
    _launch(rounded, weight, bias, out, tile, gated=False, pdl=pdl)
    return out


def _launch(
    rounded: RoundedInputs,
    weight: PackedWords,
    bias: Tensor | None,
    out: Tensor,
    tile: Fp8Tile,
    *,
    gated: bool,
    pdl: bool,
) -> None:
    (codes, x_scale), (n, k) = rounded, weight.shape
    (groups, m), rows = x_scale.shape, codes.shape[0]
    blocked = groups > 1
    w, box = weight.words.view(torch.float8_e4m3fn), [W_ROWS.value // 16, 2, 8, BLOCK_K.value]
    # 8 rows of gate and 8 of up in turn, so that a thread has a gate and its up; or 16 rows that follow each other
    between = n // 2 * k if gated else 8 * k
    tiles_n = cdiv(n, tile.groups * W_ROWS.value)
    width, columns = out.shape[-1], W_ROWS.value // 2 if gated else W_ROWS.value
    out_box, item = [1, tile.piece, columns], out.element_size()
    out_layout = gl.NVMMASharedLayout(min(128, columns * item), 8 * item, rank=3)
    staged_bytes = tile.groups * tile.piece * columns * item
    scale_bytes = 4 * max(tile.x_rows, ALIGNED_SCALES.value) if blocked else 0
    stage_bytes = (tile.groups * W_ROWS.value + tile.x_rows) * BLOCK_K.value + scale_bytes
    stages = (_device_limits()[1] - OTHER_BYTES - staged_bytes) // stage_bytes
    scales: Any = x_scale
    if blocked:
        assert tile.x_rows == tile.piece
        scales = TensorDescriptor(x_scale, [groups, rows], [x_scale.stride(0), 1], [1, tile.x_rows], X_SCALES)
    launch(
        _fp8_some_rows_kernel,
        (min(num_sms(), cdiv(m, tile.x_rows) * tiles_n * tile.splits),),
        TensorDescriptor(codes, [rows, k], [k, 1], [tile.piece, BLOCK_K.value], X_CODES),
        TensorDescriptor(w, [n // 16, 2, 8, k], [8 * k if gated else 16 * k, between, k, 1], box, W_CODES),
        TensorDescriptor(out, [tile.splits, m, width], [m * width, width, 1], out_box, out_layout),
        scales,
        weight.scale,
        bias,
        m,
        width,
        k // BLOCK_K.value,
        tiles_n,
        PIECES=tile.x_rows // tile.piece,
        GROUPS=tile.groups,
        SPLITS=tile.splits,
        STAGES=stages,
        SCALE_ROWS=weight.scale_rows,
        GATED=gated,
        BLOCKED=blocked,
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
