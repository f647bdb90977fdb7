"""The experts of any number of tokens with packed weights.

Which kernel is the fastest depends on the format and on the number of pairs. Few only read the weights
(packed_rows.py). For more MXFP4 has a kernel on Hopper (packed_wide.py); all else uses the kernel of this file: pairs
are grouped by expert as in grouped.py, and the weights are unpacked in registers as in linear/packed_tiled.py. With
many pairs per expert the weights of the layer are unpacked once instead, and multiplied by the kernels of grouped.py.
These kernels do not round inputs, also where the checkpoint says so. On Hopper fp8_experts.py does.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.packed import PackedWords, interpreted, scales
from nanovllm.kernels.linear.packed_dequantize import packed_dequantize
from nanovllm.kernels.linear.packed_tiled import PackedTile, _groups, _num_stages, add_span
from nanovllm.kernels.moe.activation import gated
from nanovllm.kernels.moe.grouped import group, grouped_forward, sum_choices
from nanovllm.kernels.moe.packed_rows import is_mxfp4, packed_expert_rows, rows_serve
from nanovllm.kernels.moe.tiles import choose_tiles
from nanovllm.kernels.moe.weights import ExpertWeights, PackedExperts

DETERMINISTIC = PackedTile(64, 64, most_stages=3)
# From so many pairs per expert on unpacking once should be faster, by what linears of these sizes take on an H200: 250
# TFLOP/s when unpacked in registers and about 500 when dense, and 1.1 ns for 1,000 weights unpacked in memory.
UNPACKED_PAIRS = 300
MAX_UNPACKED_BYTES = 4 << 30  # the memory is taken from the KV cache
# Up to here the kernel of packed_rows.py is the fastest that was measured on an H200: for gpt-oss-20b (MXFP4) at 1
# token, and without Gluon at 8 and 16; for Qwen3-30B-A3B (fp8) at 1 but not at 8, where its weights are read faster by
# tiles.
ROW_TOKENS = 2  # without groups
ROW_CHOICES = 8
ROW_PAIRS = 2  # per expert, of 4-bit weights, in groups
# From so many pairs on packed_wide.py is faster: 8 tokens of gpt-oss-20b (100 instead of 117 microseconds). For fewer,
# its large tiles would not divide evenly among the multiprocessors (reckoned).
WIDE_PAIRS = 32
FP8_SIZES = 128  # divides hidden size and intermediate size that fp8_experts.py serves


def choose_kernel(layer: PackedExperts, num_tokens: int, top_k: int, dtype: torch.dtype, *, gluon: bool) -> str:
    """`fp8`, `rows` (without groups), `grouped_rows`, `wide`, `unpacked` or `tiled`."""
    weights, num_pairs = (layer.gate_up, layer.down), num_tokens * top_k
    if gluon and dtype.itemsize == 2 and fp8_serves(layer):
        return "fp8"
    pairs_per_expert = num_pairs / layer.down.shape[0]
    by_rows = all(rows_serve(weight, dtype) for weight in weights)
    wide = gluon and dtype == torch.bfloat16 and all(is_mxfp4(weight) for weight in weights)
    if by_rows and num_tokens <= ROW_TOKENS and top_k <= ROW_CHOICES:
        return "rows"
    few = pairs_per_expert <= ROW_PAIRS and not (wide and num_pairs >= WIDE_PAIRS)
    if by_rows and few and all(weight.bits == 4 for weight in weights):
        return "grouped_rows"
    if wide:
        return "wide"
    num_weights = sum(math.prod(weight.shape) for weight in weights)
    if pairs_per_expert > UNPACKED_PAIRS and num_weights * dtype.itemsize <= MAX_UNPACKED_BYTES:
        return "unpacked"
    return "tiled"


def fp8_serves(layer: PackedExperts) -> bool:
    """Whether fp8_experts.py, which rounds inputs, takes these weights."""
    if layer.gate_up_bias is not None or layer.down_bias is not None or layer.down.shape[-1] % FP8_SIZES:
        return False
    return layer.down.shape[-2] % FP8_SIZES == 0 and all(
        weight.rounds_inputs
        and weight.distance == 64
        and weight.shape[-1] // weight.scale.shape[-1] in (weight.shape[-1], 128)
        and weight.shape[-2] % weight.scale_rows == 0
        for weight in (layer.gate_up, layer.down)
    )


def expert_tile(pairs_per_expert: float, bits: int, *, deterministic: bool) -> PackedTile:
    """`deterministic` uses the same tile for any number of tokens.

    Up to 8 pairs per expert of 8-bit weights this is the fastest that was measured on an H200 (Qwen3-30B-A3B in fp8, 8
    to 64 tokens): with 4 stages more programs fit on a multiprocessor than with 6. The rest is chosen by reasoning.
    """
    if deterministic:
        return DETERMINISTIC
    if pairs_per_expert <= 8:
        return PackedTile(16, 64, most_stages=4 if bits == 8 else 6)
    if pairs_per_expert <= 24:
        return PackedTile(32, 64)
    return PackedTile(64, 64) if pairs_per_expert <= 96 else PackedTile(64, 128, num_warps=8)


@triton.jit(do_not_specialize=["num_pairs"])
def _packed_experts_kernel(
    x,  # [num_pairs / SHARED, K]
    words,  # [E, rows, K * bits / 32], rows: N, or GATED 2 * N, the gate rows, then the up rows
    scale,
    zero,
    minimum,
    scale_unit,
    minimum_unit,
    bias,  # [E, rows] or None
    pairs,  # [max_blocks * BLOCK_M]
    block_experts,  # [max_blocks]
    routing,  # [num_pairs], the routing weights; not used if GATED
    out,  # [num_pairs, N]
    num_pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SHARED: tl.constexpr,  # number of consecutive pairs that use the same row of x
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = activation(gate(x), up(x)), or routing weight * down(x), with the weights of each pair's expert."""
    DOT_TYPE: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty  # the interpreter's dot: no bfloat16
    SPAN: tl.constexpr = DISTANCE * PAIRS
    GROUP: tl.constexpr = K // GROUPS
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    ROWS: tl.constexpr = 2 * N if GATED else N
    TILES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    block = tl.program_id(0) // TILES
    first_n = tl.program_id(0) % TILES * WIDTH
    j = tl.arange(0, BLOCK_N)
    if GATED:  # one thread must hold a gate and its up, which are rows eight apart
        w_rows = tl.minimum(first_n + j // 16 * 8 + j % 8, N - 1) + j // 8 % 2 * N
    else:
        w_rows = tl.minimum(first_n + j, N - 1)
    if PDL and GATED:  # the next kernel starts when the one before this has ended, and need not wait for its blocks
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = pair < num_pairs
    scale += expert * ((ROWS + SCALE_ROWS - 1) // SCALE_ROWS * GROUPS)
    if zero is not None:
        zero += expert * (ROWS * GROUPS)
    if minimum is not None:
        minimum += expert * (ROWS * GROUPS)
    if scale_unit is not None:
        scale_unit += expert * (ROWS * UNITS)
    if minimum_unit is not None:
        minimum_unit += expert * (ROWS * UNITS)
    w_pointers = words + (expert * ROWS + w_rows)[:, None] * (K // (2 * PAIRS)) + tl.arange(0, DISTANCE // 2)[None, :]
    x_pointers = x + (pair // SHARED).to(tl.int64)[:, None] * K + tl.arange(0, DISTANCE)[None, :]
    x_mask = tl.broadcast_to(valid[:, None], (BLOCK_M, DISTANCE))
    found = _groups(
        scale, zero, minimum, scale_unit, minimum_unit, w_rows, 0, SPAN, GROUP, KIND, GROUPS, UNITS, SCALE_ROWS
    )
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for span in tl.range(0, K // SPAN, num_stages=STAGES):
        codes = tl.load(w_pointers + span * (DISTANCE // 2))
        now = found
        found = _groups(  # of the next span: they are loaded while this one is multiplied
            scale, zero, minimum, scale_unit, minimum_unit, w_rows, tl.minimum(span + 1, K // SPAN - 1), SPAN, GROUP,
            KIND, GROUPS, UNITS, SCALE_ROWS,
        )  # fmt: skip
        y = add_span(
            y, codes, x_pointers + span * SPAN, x_mask, now, KIND, PAIRS, DISTANCE, max(1, SPAN // GROUP), GROUPS == 1,
            DOT_TYPE, INTERPRETED,
        )  # fmt: skip
    if GROUPS == 1:
        y *= scales(scale, scale_unit, w_rows, 0, None, GROUPS, UNITS, SCALE_ROWS)[:, None]
    if bias is not None:
        y += tl.load(bias + expert * ROWS + w_rows).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (WIDTH // 8, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
        y = tl.reshape(gated(gate, up, ALPHA, LIMIT, GELU), (WIDTH, BLOCK_M))
    else:
        y *= tl.load(routing + pair, mask=valid, other=0.0).to(tl.float32)[None, :]
    n = first_n + tl.arange(0, WIDTH)
    offset = pair.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=valid[None, :] & (n < N)[:, None])


def _unpacked(layer: PackedExperts, x: Tensor, *, pdl: bool) -> ExpertWeights:
    """With weights of x's type."""
    gate_up, down = (packed_dequantize(weight, x.dtype, pdl=pdl) for weight in (layer.gate_up, layer.down))
    return ExpertWeights(
        gate_up,
        down,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
        alpha=layer.alpha,
        limit=layer.limit,
        gelu=layer.gelu,
    )


def packed_experts_forward(
    x: Tensor,  # [T, H] bfloat16 or float16
    layer: PackedExperts,
    weights: Tensor,  # [T, k]
    experts: Tensor,  # [T, k]
    out: Tensor,  # [T, H]
    residual: Tensor | None,
    *,
    in_parts: bool = False,
    deterministic: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Returns `out`, or with `in_parts` maybe [k, T, H] (see `experts_forward`). `deterministic` uses one kernel with
    one tile for any number of tokens."""
    pairs_per_expert = experts.numel() / layer.down.shape[0]
    kernel = "tiled"
    if not deterministic:
        kernel = choose_kernel(layer, x.shape[0], experts.shape[1], x.dtype, gluon=gluon_usable())
    arguments = weights, experts, out, residual
    if kernel in ("rows", "grouped_rows"):
        return packed_expert_rows(x, layer, *arguments, grouped=kernel == "grouped_rows", pdl=pdl)
    if kernel == "fp8":
        from nanovllm.kernels.moe.fp8_experts import fp8_experts

        return fp8_experts(x, layer, *arguments, pdl=pdl)
    if kernel == "wide":
        from nanovllm.kernels.moe.packed_wide import expert_wide_tile, packed_wide_experts

        wide_tile = expert_wide_tile(pairs_per_expert)
        return packed_wide_experts(x, layer, *arguments, wide_tile, in_parts=in_parts, pdl=pdl)
    if kernel == "unpacked":
        tiles = choose_tiles(pairs_per_expert, x.dtype, deterministic=False)
        return grouped_forward(x, _unpacked(layer, x, pdl=pdl), *arguments, tiles, pdl=pdl)
    tile = expert_tile(pairs_per_expert, layer.down.bits, deterministic=deterministic)
    return packed_tiled_experts(x, layer, *arguments, tile, pdl=pdl)


def packed_tiled_experts(
    x: Tensor,  # [T, H] bfloat16 or float16
    layer: PackedExperts,
    weights: Tensor,  # [T, k]
    experts: Tensor,  # [T, k]
    out: Tensor,  # [T, H]
    residual: Tensor | None,
    tile: PackedTile,
    *,
    pdl: bool,
) -> Tensor:
    """Four launches: group, gate_up, down, sum. Returns `out`."""
    num_experts, hidden_size, size = layer.down.shape
    top_k, num_pairs = experts.shape[1], experts.numel()
    pairs, block_experts = group(experts, num_experts, block_m=tile.block_m, pdl=pdl)
    hidden = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    y = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)
    activation: dict[str, Any] = {"ALPHA": layer.alpha, "LIMIT": layer.limit, "GELU": layer.gelu}

    def multiply(
        x: Tensor, weight: PackedWords, bias: Tensor | None, out: Tensor, *, shared: int, is_gated: bool
    ) -> None:
        k, width = x.shape[1], tile.block_n // 2 if is_gated else tile.block_n
        num_spans = k // (weight.distance * weight.num_pairs)
        launch(
            _packed_experts_kernel,
            (block_experts.numel() * cdiv(out.shape[1], width),),
            x,
            *weight.pointers,
            bias,
            pairs,
            block_experts,
            weights,
            out,
            num_pairs,
            N=out.shape[1],
            K=k,
            **weight.constants,
            SHARED=shared,
            GATED=is_gated,
            **activation,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            STAGES=_num_stages(tile, weight, num_spans, x.element_size()),
            INTERPRETED=interpreted(_packed_experts_kernel),
            PDL=pdl,
            num_warps=tile.num_warps,
            pdl=pdl,
        )

    multiply(x, layer.gate_up, layer.gate_up_bias, hidden, shared=top_k, is_gated=True)
    multiply(hidden, layer.down, layer.down_bias, y, shared=1, is_gated=False)
    return sum_choices(y, experts, num_experts, out, residual, pdl=pdl)
