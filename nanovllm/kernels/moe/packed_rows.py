"""The experts of a few tokens each, with packed weights: the limit is reading the weights.

As in linear/packed_rows.py, words go from memory straight into registers, with several loads of 16 bytes per thread on
their way, and become the left operand of the tensor cores there (see fragments.py); the right one is x, whose rows are
its eight columns. The warps of a program divide K.

For one or two tokens every (token, choice) pair reads its expert by itself, in two launches: the warps of a program
of `down` also divide the token's choices, so that their sum is that of the warps. For more tokens pairs are grouped by
expert first and each token's choices are added last, as in grouped.py: four launches.

The weights of `down` are loaded ahead before the kernel before it has ended: which experts are used is known by then.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2
from nanovllm.kernels.linear.few_rows import _replaced
from nanovllm.kernels.linear.fragments import axis, in_mma_order, operand, rows_of
from nanovllm.kernels.linear.one_row import weight_rows
from nanovllm.kernels.linear.packed import (
    SCALED_FP4,
    PackedWords,
    fp4_factors,
    interpreted,
    loaded,
    numbers,
    scaled_fp4,
    scales,
    zeros_of,
)
from nanovllm.kernels.moe.activation import gated
from nanovllm.kernels.moe.grouped import group, sum_choices
from nanovllm.kernels.moe.weights import PackedExperts


class ExpertRowTile(NamedTuple):
    sixteens: int  # blocks of sixteen rows of the weight per program, which read the same x
    num_warps: int  # that divide K; in `down` without groups for each choice
    num_ahead: int  # steps of a warp that are loaded ahead
    most_registers: int | None = None  # per thread


# gate_up and down, the fastest of those that were measured on an H200 for gpt-oss-20b
UNGROUPED = ExpertRowTile(1, 4, 4), ExpertRowTile(1, 2, 4)
UNGROUPED_MXFP4 = ExpertRowTile(3, 4, 1, 128), ExpertRowTile(1, 2, 3)  # one token: all programs run at once
GROUPED = ExpertRowTile(2, 4, 2), ExpertRowTile(2, 4, 2)


def rows_serve(weight: PackedWords, dtype: torch.dtype) -> bool:
    """Whether the kernel takes weights of this form and inputs of this type."""
    if weight.minimum is not None or dtype == torch.float32:
        return False
    return dtype == torch.bfloat16 if is_mxfp4(weight) else weight.distance >= 32


def is_mxfp4(weight: PackedWords) -> bool:
    """With groups of 32 columns: a rank's part of a weight may have smaller ones."""
    whole = weight.scale.shape[-1] * 32 == weight.shape[-1]
    return weight.kind == "fp4" and weight.scale.dtype == torch.uint8 and whole


@triton.jit
def _first_words(unit, CHUNKS: tl.constexpr):
    """The index within its row of the first of each four words that a thread loads at once: [4, 1, WARPS, 1, CHUNKS, 1]
    for `unit` [1, 1, WARPS, 1, 1, 1]."""
    return unit * (16 * CHUNKS) + axis(CHUNKS, 4, 6) * 16 + axis(4, 0, 6) * 4


@triton.jit
def _x_words(unit, PAIRS: tl.constexpr, DISTANCE: tl.constexpr, CHUNKS: tl.constexpr):
    """The index within its row of x, in words of two items, of what the first pairs of the same words are multiplied
    with. Written so that Triton knows it to be a multiple of four."""
    SPAN: tl.constexpr = DISTANCE * PAIRS // 2
    lane = axis(4, 0, 6)
    if DISTANCE == 16:  # two spans
        return (unit * 2 + lane // 2) * SPAN + lane % 2 * 4
    else:
        return unit * SPAN + axis(CHUNKS, 4, 6) * 16 + lane * 4


@triton.jit
def _unit(
    words, scale, zero, scale_unit, expert, first_n, unit, N, K: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    PAIRS: tl.constexpr, DISTANCE: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, GATED: tl.constexpr, MXFP4: tl.constexpr,
):  # fmt: skip
    """Load one unit of columns per warp of sixteen rows: words, scales and zeros. Zeros past the last unit.

    `unit`: [1, 1, WARPS, 1, 1, 1]; `expert`: the same, or one number. MXFP4: the exponents of a thread's words, as
    words of bytes; else scales and zeros as tuples with one tensor per group.
    """
    WARPS: tl.constexpr = unit.shape[2]
    SPAN: tl.constexpr = DISTANCE * PAIRS
    GROUP: tl.constexpr = K // GROUPS
    PARTS: tl.constexpr = max(1, SPAN // GROUP)
    n = weight_rows(rows_of(2), first_n, N, GATED)
    word = _first_words(unit, CHUNKS)
    row = expert * ROWS + n
    pointers = words + row.to(tl.int64) * (K // (2 * PAIRS)) + word + axis(4, 5, 6)
    inside = tl.broadcast_to(word < K // (2 * PAIRS), (4, 8, WARPS, 2, CHUNKS, 1))
    codes = loaded(pointers, tl.broadcast_to(inside, pointers.shape))
    found_scales = ()  # type: tuple
    found_zeros = ()  # type: tuple
    if MXFP4:
        # a span has two or four groups: its exponents are one number of 16 or 32 bits
        TYPE: tl.constexpr = tl.int16 if PARTS == 2 else tl.int32
        at = scale.to(tl.pointer_type(TYPE)) + (row * (GROUPS // PARTS) + word // (DISTANCE // 2))
        found_scales += (loaded(at, inside).to(tl.int32),)
    else:
        n = weight_rows(tl.arange(0, 16), first_n, N, GATED)[None, :]
        unit_2d = tl.reshape(unit, (WARPS, 1))
        expert_2d = tl.reshape(expert, (WARPS, 1)) if len(expert.shape) > 0 else expert
        scale += expert_2d * ((ROWS + SCALE_ROWS - 1) // SCALE_ROWS * GROUPS)
        if scale_unit is not None:
            scale_unit += expert_2d * (ROWS * UNITS)
        for part in tl.static_range(PARTS):
            if GROUPS > 1:
                at = unit_2d * SPAN // GROUP + part
                inside = unit_2d < K // SPAN
                found_scales += (scales(scale, scale_unit, n, at, inside, GROUPS, UNITS, SCALE_ROWS),)
            if zero is not None or KIND == "int4":
                at_words = unit * SPAN // GROUP + part
                inside = tl.broadcast_to(unit < K // SPAN, (1, 8, WARPS, 2, 1, 1))
                found_zeros += (zeros_of(zero, None, row, at_words, inside, GROUPS, KIND),)
    return codes, found_scales, found_zeros


@triton.jit
def _shifted(tiles, later):
    """Without as many of the first as `later` has, which are put at the end."""
    result = ()  # type: tuple
    for i in tl.static_range(len(later), len(tiles)):
        result += (tiles[i],)
    for i in tl.static_range(len(later)):
        result += (later[i],)
    return result


@triton.jit
def _inputs(
    x_rows, unit, FIRST: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What pairs FIRST to FIRST + COUNT - 1 of a unit's words are multiplied with, a tensor for each. MASKED: zeros
    past the last column."""
    CHUNKS: tl.constexpr = max(1, DISTANCE // 32)
    pointers = x_rows + _x_words(unit, PAIRS, DISTANCE, CHUNKS) + axis(4, 5, 6)
    inside = None
    if MASKED:
        inside = tl.broadcast_to(_first_words(unit, CHUNKS) < K // (2 * PAIRS), pointers.shape)
    found = ()  # type: tuple
    for i in tl.static_range(FIRST, FIRST + COUNT):
        found += (loaded(pointers + i * (DISTANCE // 2), inside),)
    return found


@triton.jit
def _added(
    y, loads, inputs, x_rows, unit, K: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, DISTANCE: tl.constexpr,
    GROUPS: tl.constexpr, MASKED: tl.constexpr, MXFP4: tl.constexpr, ITEM: tl.constexpr, DOT_TYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y, each [WARPS, 16, rows of x], plus W x^T of a unit's columns: the first of the `loads`. Empty `inputs` are
    loaded here."""
    PARTS: tl.constexpr = max(1, DISTANCE * PAIRS * GROUPS // K)  # groups of a span
    PAIRS_OF_GROUP: tl.constexpr = PAIRS // PARTS
    for part in tl.static_range(PARTS):
        if len(inputs) == 0:
            own = _inputs(x_rows, unit, part * PAIRS_OF_GROUP, PAIRS_OF_GROUP, K, PAIRS, DISTANCE, MASKED)
        bs = ()  # type: tuple
        for i in tl.static_range(PAIRS_OF_GROUP):
            a = own[i] if len(inputs) == 0 else inputs[part * PAIRS_OF_GROUP + i]
            bs += (tl.permute(operand(a, ITEM, DOT_TYPE, INTERPRETED), (0, 2, 1)),)
        for block in tl.static_range(len(y)):
            codes, found_scales, found_zeros = loads[block]
            if MXFP4:
                factors = fp4_factors(found_scales[0], part)
                for i in tl.static_range(PAIRS_OF_GROUP):
                    w = in_mma_order(scaled_fp4(codes, factors, part * PAIRS_OF_GROUP + i, INTERPRETED))
                    y = _replaced(y, block, tl.dot(w, bs[i], y[block]))
            else:
                zeros = found_zeros[part] if len(found_zeros) > 0 else None
                sums = y[block] if GROUPS == 1 else tl.zeros(y[block].shape, tl.float32)
                for i in tl.static_range(PAIRS_OF_GROUP):
                    w = in_mma_order(numbers(codes, zeros, part * PAIRS_OF_GROUP + i, KIND, ITEM, INTERPRETED))
                    sums = tl.dot(w, bs[i], sums)
                if GROUPS > 1:
                    sums = y[block] + sums * found_scales[part][:, :, None]
                y = _replaced(y, block, sums)
    return y


@triton.jit(do_not_specialize=["num_pairs"])
def _packed_expert_rows_kernel(
    x,  # [num_pairs / SHARED, K]
    words,  # [E, rows, K * bits / 32], rows: N, or GATED 2 * N, the gate rows, then the up rows
    scale,
    zero,
    scale_unit,
    bias,  # [E, rows] or None
    pairs,  # [max_blocks * 8], or None: without groups
    block_experts,  # [max_blocks], or without groups the expert of each pair
    routing,  # [num_pairs], the routing weights; not used if GATED
    residual,  # [tokens, N] or None; with CHOICES above 1
    out,  # [num_pairs, N], or [tokens, N] with CHOICES above 1
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    MXFP4: tl.constexpr,  # scales are multiplied into the numbers, else with sums
    SHARED: tl.constexpr,  # number of consecutive pairs that use the same row of x
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    TOP_K: tl.constexpr,  # choices of a token that a program adds; 1: none are added
    CHOICES: tl.constexpr,  # TOP_K, padded to a power of two
    SIXTEENS: tl.constexpr,  # blocks of sixteen rows of the weight
    SPLITS: tl.constexpr,  # warps that divide K
    MOST_AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = activation(gate(x), up(x)), or routing weight * down(x) of each pair, or the sum of a token's choices."""
    ITEM: tl.constexpr = x.dtype.element_ty
    DOT_TYPE: tl.constexpr = tl.float32 if INTERPRETED else ITEM  # the interpreter's dot does not support bfloat16
    CHUNKS: tl.constexpr = max(1, DISTANCE // 32)
    UNIT_WORDS: tl.constexpr = 16 * CHUNKS  # one span or, where these have eight words, two
    ROW_WORDS: tl.constexpr = K // (2 * PAIRS)
    STEPS: tl.constexpr = (ROW_WORDS + UNIT_WORDS * SPLITS - 1) // (UNIT_WORDS * SPLITS)
    AHEAD: tl.constexpr = min(STEPS, MOST_AHEAD)
    WARPS: tl.constexpr = CHOICES * SPLITS
    ROWS: tl.constexpr = 2 * N if GATED else N
    WIDTH: tl.constexpr = 8 if GATED else 16
    TILES: tl.constexpr = (N + SIXTEENS * WIDTH - 1) // (SIXTEENS * WIDTH)
    block = tl.program_id(0) // TILES
    first_n = tl.program_id(0) % TILES * (SIXTEENS * WIDTH)
    if PDL and GATED:  # the next kernel starts when the one before this has ended, and need not wait for what it wrote
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    warp = axis(WARPS, 2, 6)
    split = warp % SPLITS
    if CHOICES > 1:
        expert = tl.load(block_experts + block * TOP_K + warp // SPLITS, mask=warp // SPLITS < TOP_K, other=-1)
        expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, 0)
    else:
        expert = tl.load(block_experts + block)
        if (expert < 0) | (expert >= EXPERTS):
            return

    ahead = ()  # type: tuple
    for i in tl.static_range(AHEAD * SIXTEENS):
        ahead += (
            _unit(
                words, scale, zero, scale_unit, expert, first_n + i % SIXTEENS * WIDTH, i // SIXTEENS * SPLITS + split,
                N, K, ROWS, KIND, PAIRS, DISTANCE, GROUPS, UNITS, SCALE_ROWS, CHUNKS, GATED, MXFP4,
            ),
        )  # fmt: skip
    # inputs are loaded one step ahead, and biases first, where this was measured to be faster
    EARLY: tl.constexpr = MXFP4 and pairs is None
    biases = ()  # type: tuple
    if EARLY and bias is not None:
        biases = _biases(bias, block_experts, block, first_n, N, EXPERTS, TOP_K, CHOICES, SIXTEENS, GATED)
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # rows past the last pair are read as the last one: their results are not stored
    if pairs is not None:
        pair = tl.load(pairs + block * 8 + rows_of(1))
        pair = tl.minimum(pair, num_pairs - 1)
    else:
        pair = block * TOP_K + tl.minimum(warp // SPLITS, TOP_K - 1) + rows_of(1) * 0
    x_rows = x.to(tl.pointer_type(tl.int32)) + (pair // SHARED).to(tl.int64) * (K // 2)
    MASKED: tl.constexpr = STEPS * SPLITS * UNIT_WORDS > ROW_WORDS
    ys = ()  # type: tuple
    for _ in tl.static_range(SIXTEENS):
        ys += (tl.zeros([WARPS, 16, 8], tl.float32),)
    later_inputs = ()  # type: tuple
    if EARLY:
        later_inputs = _inputs(x_rows, split, 0, PAIRS, K, PAIRS, DISTANCE, MASKED)
    for step in range(STEPS):
        unit = step * SPLITS + split
        inputs = later_inputs
        if EARLY:
            later_unit = tl.minimum(step + 1, STEPS - 1) * SPLITS + split
            later_inputs = _inputs(x_rows, later_unit, 0, PAIRS, K, PAIRS, DISTANCE, MASKED)
        later = ()  # type: tuple
        for i in tl.static_range(SIXTEENS):
            later += (
                _unit(
                    words, scale, zero, scale_unit, expert, first_n + i * WIDTH, unit + AHEAD * SPLITS, N, K, ROWS,
                    KIND, PAIRS, DISTANCE, GROUPS, UNITS, SCALE_ROWS, CHUNKS, GATED, MXFP4,
                ),
            )  # fmt: skip
        ys = _added(
            ys, ahead, inputs, x_rows, unit, K, KIND, PAIRS, DISTANCE, GROUPS, MASKED, MXFP4, ITEM, DOT_TYPE,
            INTERPRETED,
        )  # fmt: skip
        ahead = _shifted(ahead, later)

    if bias is not None and not EARLY:
        biases = _biases(bias, block_experts, block, first_n, N, EXPERTS, TOP_K, CHOICES, SIXTEENS, GATED)
    _store(
        ys, scale, scale_unit, biases, pairs, block_experts, routing, residual, out, block, first_n, num_pairs, N,
        EXPERTS, GROUPS, UNITS, SCALE_ROWS, MXFP4, GATED, ALPHA, LIMIT, GELU, TOP_K, CHOICES, SPLITS,
    )  # fmt: skip


@triton.jit
def _chosen(block_experts, block, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """[CHOICES] experts of a program, and which of them are experts; others are given as the first."""
    choice = tl.arange(0, CHOICES)
    if CHOICES > 1:
        expert = tl.load(block_experts + block * TOP_K + choice, mask=choice < TOP_K, other=-1)
    else:
        expert = tl.load(block_experts + block + choice)
    chosen = (expert >= 0) & (expert < EXPERTS)
    return tl.where(chosen, expert, 0), chosen


@triton.jit
def _biases(
    bias, block_experts, block, first_n, N: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    CHOICES: tl.constexpr, SIXTEENS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The experts' biases for each block of 16 weight rows of the program, as tensors [CHOICES, 16] in float32."""
    ROWS: tl.constexpr = 2 * N if GATED else N
    WIDTH: tl.constexpr = 8 if GATED else 16
    found = ()  # type: tuple
    for i in tl.static_range(SIXTEENS):
        n = weight_rows(tl.arange(0, 16), first_n + i * WIDTH, N, GATED)[None, :]
        expert, _ = _chosen(block_experts, block, EXPERTS, TOP_K, CHOICES)
        found += (tl.load(bias + expert[:, None] * ROWS + n).to(tl.float32),)
    return found


@triton.jit
def _store(
    ys, scale, scale_unit, biases, pairs, block_experts, routing, residual, out, block, first_n, num_pairs,
    N: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    MXFP4: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add up the warps' sums and write the results."""
    ROWS: tl.constexpr = 2 * N if GATED else N
    WIDTH: tl.constexpr = 8 if GATED else 16
    choice = tl.arange(0, CHOICES)
    expert, chosen = _chosen(block_experts, block, EXPERTS, TOP_K, CHOICES)
    expert = expert[:, None]
    m = tl.arange(0, 8)
    if pairs is not None:
        pair = tl.load(pairs + block * 8 + m)
        valid = pair < num_pairs
    else:
        pair, valid = block + m * 0, m == 0
    if not GATED:
        if CHOICES > 1:
            weight = tl.load(routing + block * TOP_K + choice, mask=chosen, other=0.0).to(tl.float32)[:, None, None]
        else:
            weight = tl.load(routing + pair, mask=valid, other=0.0).to(tl.float32)[None, None, :]
    for block_n in tl.static_range(len(ys)):
        y = tl.sum(tl.reshape(ys[block_n], (CHOICES, SPLITS, 16, 8)), axis=1)
        n = weight_rows(tl.arange(0, 16), first_n + block_n * WIDTH, N, GATED)[None, :]
        if MXFP4:
            y *= 1 / SCALED_FP4
        elif GROUPS == 1:
            offset = expert * ((ROWS + SCALE_ROWS - 1) // SCALE_ROWS)
            unit = None if scale_unit is None else scale_unit + expert * (ROWS * UNITS)
            y *= scales(scale + offset, unit, n, 0, None, GROUPS, UNITS, SCALE_ROWS)[:, :, None]
        if len(biases) > 0:
            y += biases[block_n][:, :, None]
        if not GATED:
            y *= weight
        y = tl.sum(tl.where(chosen[:, None, None], y, 0.0), axis=0)  # what is no expert's was never written
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(y, (WIDTH, 2, 8)), (0, 2, 1)))
            y = gated(gate, up, ALPHA, LIMIT, GELU)
        out_n = first_n + block_n * WIDTH + tl.arange(0, WIDTH)[:, None]
        mask = valid[None, :] & (out_n < N)
        offset = pair.to(tl.int64)[None, :] * N + out_n
        if residual is not None:
            y += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offset, y.to(out.dtype.element_ty), mask=mask)


def packed_expert_rows(
    x: Tensor,  # [T, H] bfloat16 or float16
    layer: PackedExperts,
    weights: Tensor,  # [T, k]
    experts: Tensor,  # [T, k]
    out: Tensor,  # [T, H]
    residual: Tensor | None,
    *,
    grouped: bool,
    pdl: bool,
) -> Tensor:
    """Two launches, or four if `grouped`. Returns `out`."""
    (num_experts, hidden_size, size), (num_tokens, top_k) = layer.down.shape, experts.shape
    num_pairs = num_tokens * top_k
    pairs, block_experts, num_blocks = None, experts, num_pairs
    if grouped:
        pairs, block_experts = group(experts, num_experts, block_m=8, pdl=pdl)
        num_blocks = block_experts.numel()
    hidden = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    ungrouped = UNGROUPED_MXFP4 if is_mxfp4(layer.gate_up) else UNGROUPED
    gate_up_tile, down_tile = GROUPED if grouped else ungrouped

    def multiply(
        x: Tensor,
        weight: PackedWords,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        tile: ExpertRowTile,
        num_blocks: int,
        *,
        shared: int,
        is_gated: bool,
        num_added: int,
    ) -> None:
        width = (8 if is_gated else 16) * tile.sixteens
        choices = next_power_of_2(num_added)
        launch(
            _packed_expert_rows_kernel,
            (num_blocks * cdiv(out.shape[1], width),),
            x,
            weight.words,
            weight.scale,
            weight.zero,
            weight.scale_unit,
            bias,
            pairs,
            block_experts,
            weights,
            residual,
            out,
            num_pairs,
            N=out.shape[1],
            K=x.shape[1],
            EXPERTS=num_experts,
            **weight.constants,
            MXFP4=is_mxfp4(weight),
            SHARED=shared,
            GATED=is_gated,
            ALPHA=layer.alpha,
            LIMIT=layer.limit,
            GELU=layer.gelu,
            TOP_K=num_added,
            CHOICES=choices,
            SIXTEENS=tile.sixteens,
            SPLITS=tile.num_warps,
            MOST_AHEAD=tile.num_ahead,
            INTERPRETED=interpreted(_packed_expert_rows_kernel),
            PDL=pdl,
            num_warps=choices * tile.num_warps,
            num_stages=1,  # the kernel loads ahead by itself
            maxnreg=tile.most_registers,
            pdl=pdl,
        )

    options: dict[str, Any] = {"shared": top_k, "is_gated": True, "num_added": 1}
    multiply(x, layer.gate_up, layer.gate_up_bias, None, hidden, gate_up_tile, num_blocks, **options)
    options = {"shared": 1, "is_gated": False, "num_added": 1 if grouped else top_k}
    if not grouped:
        multiply(hidden, layer.down, layer.down_bias, residual, out, down_tile, num_tokens, **options)
        return out
    y = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)
    multiply(hidden, layer.down, layer.down_bias, None, y, down_tile, num_blocks, **options)
    return sum_choices(y, experts, num_experts, out, residual, pdl=pdl)
