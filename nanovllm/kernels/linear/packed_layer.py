"""All that a layer computes between two attentions as one kernel, for 1 to 8 rows and packed 4-bit weights on Hopper.

Four products: o, gate and up, down, and q, k and v of the next layer. As launches of their own they leave memory idle
at every change: the last words must be unpacked, results be written and read, before the next words are asked for. Here
one program per multiprocessor computes its rows of all four. A warp of its own loads words in the order of their use,
as far ahead as shared memory has room, past the points where programs wait for each other: weights do not depend on
results.

Programs wait for each other after o and after down: gate and up, and q, k and v, need a whole row of the residual. Down
needs 2,048 columns at a time. Those are what all programs compute together in one block of gate and up, sixteen columns
each, so it begins while other programs may still be some blocks behind. All waiting goes through one more warp
(layer_events.py).

A number q of 4 bits is placed in a bfloat16 whose exponent's bits are zero: it is then q * 2^-133 (or 16 times as much
for every second pair of a word), without a shift for two of four pairs, and without something to be subtracted. Inputs
are multiplied with a power of two that brings the products back to usual sizes.

Every row of a weight is multiplied by one program in a fixed order: results are always the same. The sum of squares of
a norm is the sum of the programs' own, and scales the product after it.

Written in Gluon, as many_rows.py. Gluon has no interpreter: tests without a GPU only compile the kernel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import launch
from nanovllm.kernels.linear.few_rows import _replaced
from nanovllm.kernels.linear.layer_events import COUNTERS, NUM_PROGRAMS, PROGRAMS, exchange, finish
from nanovllm.kernels.linear.layer_products import (
    DOWN,
    MAX_ROWS,
    MMA,
    ROWS,
    UP,
    WARPS,
    first_unit,
    inputs_of,
    next_stage,
    product,
    release,
    right_operand,
    scaled,
    totals_of,
    unit_of,
)
from nanovllm.kernels.linear.many_rows import _async_load, _barrier
from nanovllm.kernels.linear.packed import PackedWords, times2
from nanovllm.kernels.linear.tiled import num_sms

BLOCK = 16 * NUM_PROGRAMS  # rows of a weight: sixteen for each program. A piece of columns is as long
HIDDEN = 2 * BLOCK  # the size of the residual, of which each program adds to 32 columns
MOST_INNER_BLOCKS, MOST_QKV_BLOCKS = COUNTERS - 2, 3
PIECE = gl.constexpr(BLOCK)
PIECES = gl.constexpr(HIDDEN // BLOCK)  # of a row of the residual
STAGES = 6  # that shared memory has room for, of two units: 16 rows of a piece
# Registers per thread at launch; warp specialization redistributes them. With this number two programs of
# small_batch.py fit on a multiprocessor beside one of this kernel, so that with up to two sequences weights load during
# attention.
REGISTERS = 136
WORKER_REGISTERS = gl.constexpr(24)  # per thread of the load warp and of the warp that waits
# sums of all warps: a thread adds those of a place of two tiles
PARTIAL = gl.constexpr(gl.BlockedLayout([WARPS.value, 1, 1, 2], [1, 16, 2, 1], [1, 1, 4, 2], [0, 1, 2, 3]))
SUM = gl.constexpr(gl.SliceLayout(0, PARTIAL.value))


# --- the warp that loads ----------------------------------------------------------------------------------------------


@gluon.jit
def _load_linear(
    linear, ring, slot, phase, BLOCKS: gl.constexpr, LENGTH: gl.constexpr, TILES: gl.constexpr, UP_ROWS: gl.constexpr
):
    """This program's words of one linear with LENGTH pieces. UP_ROWS: the distance from a gate row to its up row.

    A stage is requested when the one before it has arrived: more requests at once would not make words come sooner, and
    what programs exchange would wait behind them.
    """
    words, scale, zero = linear
    ws, ss, zs, full, empty = ring
    BYTES: gl.constexpr = 2 * (16 * 1024 + 16 * 32 + (0 if zero is None else 16 * 16))
    WIDTH: gl.constexpr = 16 if UP_ROWS > 0 else 16 * TILES
    DISTANCE: gl.constexpr = UP_ROWS if UP_ROWS > 0 else 16
    for block in range(BLOCKS):
        first = (block * PROGRAMS + gl.program_id(0)) * WIDTH
        for stage in range(LENGTH * TILES // 2):
            mbarrier.wait(empty.index(slot), phase ^ 1)  # returns at once for a new barrier and parity 1
            mbarrier.expect(full.index(slot), BYTES)
            for unit in gl.static_range(2):
                index = stage * 2 + unit
                row = first + index % TILES * DISTANCE
                span = index // TILES * WARPS
                _async_load(words, [span, row, 0], full.index(slot), ws.index(slot * 2 + unit))
                _async_load(scale, [row, span], full.index(slot), ss.index(slot * 2 + unit))
                if zero is not None:
                    _async_load(zero, [row, span], full.index(slot), zs.index(slot * 2 + unit))
            mbarrier.wait(full.index(slot), phase)
            slot, phase = next_stage(slot, phase, full.shape[0])
    return slot, phase


@gluon.jit
def _produce(linears, ring, O_PIECES: gl.constexpr, INNER_BLOCKS: gl.constexpr, QKV_TILES: gl.constexpr):
    o, gate_up, down, qkv = linears
    slot = 0
    phase = 0
    slot, phase = _load_linear(o, ring, slot, phase, 1, O_PIECES, 2, 0)
    slot, phase = _load_linear(gate_up, ring, slot, phase, INNER_BLOCKS, PIECES, 2, INNER_BLOCKS * PIECE)
    slot, phase = _load_linear(down, ring, slot, phase, 1, INNER_BLOCKS, 2, 0)
    if QKV_TILES > 0:
        _load_linear(qkv, ring, slot, phase, 1, PIECES, QKV_TILES, 0)


# --- the warps that multiply ------------------------------------------------------------------------------------------


@gluon.jit
def _summed(ys, FIRST: gl.constexpr):
    """Tiles FIRST and the next of a product, [16 rows, 8, 2]: the sum over warps. A last tile is taken twice."""
    both = gl.join(ys[FIRST], ys[min(FIRST + 1, len(ys) - 1)])
    return gl.sum(gl.convert_layout(both, PARTIAL), axis=0) * DOWN


@gluon.jit
def _place(first, stride, DISTANCE: gl.constexpr):
    """[16 rows, 8, 2] offsets of a result, whose second tile is DISTANCE after the first."""
    n = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, SUM)))
    m = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUM)))
    tile = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, SUM)))
    place = gl.expand_dims(gl.expand_dims(first + n, 1), 2) + gl.expand_dims(gl.expand_dims(m * stride, 0), 2)
    return place + gl.expand_dims(gl.expand_dims(tile * DISTANCE, 0), 1)


@gluon.jit
def _is_row(M):
    m = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUM)))
    return gl.expand_dims(gl.expand_dims(m < M, 0), 2)


@gluon.jit
def _add(ys, before, out, squares, place, M):
    """Add the products to the residual, and store the sum of squares of this program's columns. Returns the new
    residual."""
    rounded = (_summed(ys, 0) + before).to(out.dtype.element_ty)
    gl.store(out + place, rounded, mask=_is_row(M))
    after = rounded.to(gl.float32)
    total = gl.sum(gl.sum(after * after, axis=2), axis=0)
    m = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUM)))
    gl.store(squares + gl.program_id(0) * ROWS + m, total)
    return after


@gluon.jit
def _squares_of_all(squares):
    """[programs, 8]: the sums of squares that `_add` stored."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    program = gl.expand_dims(gl.arange(0, PROGRAMS, gl.SliceLayout(1, LAYOUT)), 1)
    m = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(squares + program * ROWS + m, cache_modifier=".cg")


@gluon.jit
def _factors(of_all, eps):
    """[1, 8, 1]: what the rows are multiplied with to be normed."""
    total = gl.convert_layout(gl.sum(of_all, axis=0), gl.SliceLayout(0, gl.SliceLayout(2, SUM)))
    return gl.expand_dims(gl.expand_dims(gl.rsqrt(total / (PIECES * PIECE) + eps), 0), 2)


@gluon.jit
def _gains(norm_weight):
    """A norm's weight, as the factors of the inputs of a product."""
    found = ()  # type: tuple
    for piece in gl.static_range(PIECES):
        words = inputs_of(norm_weight, 0, ROWS, piece)
        of_piece = ()  # type: tuple
        for pair in gl.static_range(4):
            of_piece += (scaled(words[pair], pair, norm_weight.dtype.element_ty),)
        found += (of_piece,)
    return found


@gluon.jit
def _resident(x, gains, M, LENGTH: gl.constexpr, ITEM: gl.constexpr):
    """All right operands of a short linear, and the totals of their groups. `gains`: multiplied with, or None."""
    bs = ()  # type: tuple
    totals = ()  # type: tuple
    words = ()  # type: tuple
    for piece in gl.static_range(LENGTH):
        words += (inputs_of(x, LENGTH * PIECE, M, piece),)
    for piece in gl.static_range(LENGTH):
        of_piece = ()  # type: tuple
        for pair in gl.static_range(4):
            found = words[piece][pair]
            found = scaled(found, pair, ITEM) if gains is None else times2(found, gains[piece][pair], ITEM)
            of_piece += (right_operand(found, ITEM),)
        bs += (of_piece,)
        totals += (totals_of(of_piece, ITEM),)
    return bs, totals


@gluon.jit
def _short(ring, slot, phase, unit, inputs, more, TILES: gl.constexpr, ITEM: gl.constexpr):
    """The next TILES * 16 rows of a weight times resident inputs. While a unit is multiplied, the next one is read from
    shared memory, after the last one only if there are `more`."""
    bs, totals = inputs
    ys = ()  # type: tuple
    for _ in gl.static_range(TILES):
        ys += (gl.zeros([WARPS, 16, ROWS], gl.float32, MMA),)
    for index in gl.static_range(len(bs) * TILES):
        if index % 2 == 0:
            coming = unit_of(ring, slot, 1)
        else:
            after, its_phase = next_stage(slot, phase, ring[3].shape[0])
            coming = first_unit(ring, after, its_phase, more if index + 1 == len(bs) * TILES else True)
        y = product(unit, (bs[index // TILES], totals[index // TILES]), ys[index % TILES], ITEM)
        ys = _replaced(ys, index % TILES, y)
        if index % 2 == 1:
            slot, phase = release(ring, slot, phase)
        unit = coming
    return ys, unit, slot, phase


@gluon.jit
def _when_ready(ready, x, M, piece, LENGTH: gl.constexpr):
    """Inputs of `down`, which all programs together have computed in one block of gate and up."""
    mbarrier.wait(ready.index(1 + piece), 0)
    return inputs_of(x, LENGTH * PIECE, M, piece)


@gluon.jit
def _long(ring, slot, phase, ready, x, M, LENGTH: gl.constexpr, ITEM: gl.constexpr):
    """As `_short` for two tiles, with inputs that are read for each piece, and have been scaled."""
    first = gl.zeros([WARPS, 16, ROWS], gl.float32, MMA)
    second = gl.zeros([WARPS, 16, ROWS], gl.float32, MMA)
    unit = first_unit(ring, slot, phase, True)
    coming = _when_ready(ready, x, M, 0, LENGTH)
    later = _when_ready(ready, x, M, gl.minimum(1, LENGTH - 1), LENGTH)
    for piece in range(LENGTH):
        bs = ()  # type: tuple
        for pair in gl.static_range(4):
            bs += (right_operand(coming[pair], ITEM),)
        coming = later
        later = _when_ready(ready, x, M, gl.minimum(piece + 2, LENGTH - 1), LENGTH)
        other = unit_of(ring, slot, 1)
        inputs = bs, totals_of(bs, ITEM)
        first = product(unit, inputs, first, ITEM)
        after, its_phase = next_stage(slot, phase, ring[3].shape[0])
        unit = first_unit(ring, after, its_phase, piece + 1 < LENGTH)
        second = product(other, inputs, second, ITEM)
        slot, phase = release(ring, slot, phase)
    return (first, second), slot, phase


@gluon.jit
def _normed(ring, slot, phase, ready, x, squares, gains, M, ITEM: gl.constexpr):
    """Wait until all programs have added to x. Returns the first unit of the next linear, its inputs, and the sums of
    squares."""
    mbarrier.wait(ready, 0)
    of_all = _squares_of_all(squares)
    inputs = _resident(x, gains, M, PIECES, ITEM)
    return first_unit(ring, slot, phase, True), inputs, of_all


@gluon.jit
def _consume(
    ring, events, tensors, M, eps, O_PIECES: gl.constexpr, INNER_BLOCKS: gl.constexpr, QKV_TILES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    x, residual, hidden, out, squares, ffn_norm, next_norm = tensors
    done, ready = events
    ITEM: gl.constexpr = x.dtype.element_ty
    program = gl.program_id(0)
    place = _place(program * 32, PIECES * PIECE, 16)
    slot = 0
    phase = 0
    if PDL:
        gdc_wait()

    # o
    inputs = _resident(x, None, M, O_PIECES, ITEM)
    before = gl.load(residual + place, mask=_is_row(M), other=0.0, cache_modifier=".cg").to(gl.float32)
    unit = first_unit(ring, slot, phase, True)
    ys, unit, slot, phase = _short(ring, slot, phase, unit, inputs, False, 2, ITEM)
    before = _add(ys, before, residual, squares, place, M)
    finish(events, 0)

    # gate and up
    gains = _gains(ffn_norm)
    unit, inputs, of_all = _normed(ring, slot, phase, ready.index(0), residual, squares, gains, M, ITEM)
    factors = _factors(of_all, eps)
    for block in range(INNER_BLOCKS):
        more = block + 1 < INNER_BLOCKS
        both, unit, slot, phase = _short(ring, slot, phase, unit, inputs, more, 2, ITEM)
        gate, up = gl.split(_summed(both, 0) * factors)
        column = (block * PROGRAMS + program) * 16
        power = (127 + UP - column // 64 % 2 * 4) << 23  # the scale of these inputs of `down`
        y = (gate / (1 + gl.exp(-gate)) * up).to(ITEM).to(gl.float32) * power.to(gl.float32, bitcast=True)
        m = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, y.type.layout)), 0)
        n = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, y.type.layout)), 1)
        gl.store(hidden + (m * (INNER_BLOCKS * PIECE) + n + column), y.to(ITEM), mask=m < M)
        finish(events, block + 1)

    # down
    ys, slot, phase = _long(ring, slot, phase, ready, hidden, M, INNER_BLOCKS, ITEM)
    squares += PROGRAMS * ROWS
    _add(ys, before, residual, squares, place, M)
    finish(events, INNER_BLOCKS + 1)

    # q, k and v
    if QKV_TILES > 0:
        gains = _gains(next_norm)
        reached = ready.index(INNER_BLOCKS + 1)
        unit, inputs, of_all = _normed(ring, slot, phase, reached, residual, squares, gains, M, ITEM)
        factors = _factors(of_all, eps)
        heads, unit, slot, phase = _short(ring, slot, phase, unit, inputs, False, QKV_TILES, ITEM)
        for tile in gl.static_range(0, QKV_TILES, 2):
            first = (program * QKV_TILES + tile) * 16
            place = _place(first, PROGRAMS * QKV_TILES * 16, 16 if tile + 1 < QKV_TILES else 0)
            gl.store(out + place, (_summed(heads, tile) * factors).to(ITEM), mask=_is_row(M))


@gluon.jit(do_not_specialize=["M"])
def _packed_layer_kernel(
    o_words, o_scale, o_zero,
    gate_up_words, gate_up_scale, gate_up_zero,
    down_words, down_scale, down_zero,
    qkv_words, qkv_scale, qkv_zero,
    x, residual, hidden, out, squares, counters, ffn_norm, next_norm,
    M,
    eps,
    O_PIECES: gl.constexpr,  # of the columns of `o`
    INNER_BLOCKS: gl.constexpr,  # of sixteen gate rows and up rows, for each program
    QKV_TILES: gl.constexpr,  # of sixteen rows of q, k and v, for each program; 0: without
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    ws = gl.allocate_shared_memory(gl.int32, [2 * STAGES] + o_words.block_shape, o_words.layout)
    ss = gl.allocate_shared_memory(gl.int32, [2 * STAGES] + o_scale.block_shape, o_scale.layout)
    zs = ss  # not used
    if o_zero is not None:
        zs = gl.allocate_shared_memory(gl.int16, [2 * STAGES] + o_zero.block_shape, o_zero.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    done = gl.allocate_shared_memory(gl.int64, [INNER_BLOCKS + 2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [INNER_BLOCKS + 2, 1], mbarrier.MBarrierLayout())
    for event in gl.static_range(INNER_BLOCKS + 2):
        mbarrier.init(done.index(event), count=1)
        mbarrier.init(ready.index(event), count=1)
    fence_async_shared()
    _barrier()
    if PDL:
        gdc_launch_dependents()
    ring = ws, ss, zs, full, empty
    events = done, ready
    linears = (
        (o_words, o_scale, o_zero),
        (gate_up_words, gate_up_scale, gate_up_zero),
        (down_words, down_scale, down_zero),
        (qkv_words, qkv_scale, qkv_zero),
    )
    tensors = x, residual, hidden, out, squares, ffn_norm, next_norm
    gl.warp_specialize(
        [
            (_consume, (ring, events, tensors, M, eps, O_PIECES, INNER_BLOCKS, QKV_TILES, PDL)),
            (_produce, (linears, ring, O_PIECES, INNER_BLOCKS, QKV_TILES)),
            (exchange, (events, counters, INNER_BLOCKS, QKV_TILES > 0, PDL)),
        ],
        [1, 1],
        [WORKER_REGISTERS, WORKER_REGISTERS],
    )


class LayerWeights(NamedTuple):
    o: PackedWords
    gate_up: PackedWords
    down: PackedWords
    qkv: PackedWords | None = None  # of the next layer


def packed_layer_serves(layers: Sequence[tuple[PackedWords, ...]]) -> bool:
    """Whether the kernel computes these layers of a model: o, gate and up, down, qkv of each. They must be alike: a
    launch multiplies weights of two, and adds as much to each counter as the launch before."""
    types = {(one.scale.dtype, None if one.zero is None else one.zero.dtype) for layer in layers for one in layer}
    if types not in ({(torch.float16, None)}, {(torch.float16, torch.uint8)}):
        return False
    if len({tuple(one.shape for one in layer) for layer in layers}) > 1 or num_sms() < NUM_PROGRAMS:
        return False
    (hidden, attended), _, (_, inner), (qkv, _) = (one.shape for one in layers[0])
    whole_blocks = attended % BLOCK == inner % BLOCK == qkv % BLOCK == 0
    fits = attended <= HIDDEN and inner <= MOST_INNER_BLOCKS * BLOCK and qkv <= MOST_QKV_BLOCKS * BLOCK
    return hidden == HIDDEN and whole_blocks and fits


def _descriptors(weight: PackedWords | None) -> tuple[TensorDescriptor | None, ...]:
    if weight is None:
        return None, None, None
    n, words = weight.words.shape
    groups = weight.scale.shape[1]
    words_layout, plain = gl.NVMMASharedLayout(128, 32, rank=3), gl.NVMMASharedLayout(0, 32, rank=2)
    shape, strides = [words // 32, n, 32], [32, words, 1]
    scale, half = weight.scale.view(torch.int32), [groups // 2, 1]
    found = [
        TensorDescriptor(weight.words, shape, strides, [8, 16, 32], words_layout),
        TensorDescriptor(scale, [n, groups // 2], half, [16, 8], plain),
        None,
    ]
    if weight.zero is not None:
        narrow = gl.NVMMASharedLayout(0, 16, rank=2)
        found[2] = TensorDescriptor(weight.zero.view(torch.int16), [n, groups // 2], half, [16, 8], narrow)
    return tuple(found)


def packed_layer(
    x: Tensor,  # [M, K of o] bfloat16, M <= MAX_ROWS
    residual: Tensor,  # [M, hidden], updated in place
    weights: LayerWeights,
    ffn_norm: Tensor,  # [hidden]
    next_norm: Tensor | None,
    eps: float,
    counters: Tensor,  # [COUNTERS] int64, zero at first, of launches of one stream and of layers of one shape
    *,
    pdl: bool = False,
) -> Tensor | None:  # [M, q, k and v of the next layer]
    m, n = residual.shape
    o, gate_up, down, qkv = weights
    hidden = x.new_empty(m, down.shape[1])
    squares = torch.empty(2, NUM_PROGRAMS, MAX_ROWS, dtype=torch.float32, device=x.device)
    out = None if qkv is None else x.new_empty(m, qkv.shape[0])
    assert m <= MAX_ROWS and n == HIDDEN and x.is_contiguous() and residual.is_contiguous()
    launch(
        _packed_layer_kernel,
        (NUM_PROGRAMS,),
        *_descriptors(o),
        *_descriptors(gate_up),
        *_descriptors(down),
        *_descriptors(qkv),
        x,
        residual,
        hidden,
        out,
        squares,
        counters,
        ffn_norm,
        next_norm,
        m,
        eps,
        O_PIECES=o.shape[1] // BLOCK,
        INNER_BLOCKS=down.shape[1] // BLOCK,
        QKV_TILES=0 if qkv is None else qkv.shape[0] // BLOCK,
        STAGES=STAGES,
        PDL=pdl,
        num_warps=WARPS.value,
        launch_cooperative_grid=True,
        pdl=pdl,
        maxnreg=REGISTERS,
    )
    return out
