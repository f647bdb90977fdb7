"""Inputs of experts rounded to fp8, for fp8_experts.py: before gate_up those of each token, in the same launch as the
norm before the router, and before `down` what gate_up wrote for each pair of a token and an expert.

A slot is a place in a block of pairs with one expert. Codes are in the order of the weight's words, and each row or
group of columns has a scale, as in linear/fp8_inputs.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launch, next_power_of_2
from nanovllm.kernels.linear.fp8_inputs import LARGEST, RoundedInputs, _pair, _with_sums
from nanovllm.kernels.linear.packed import PackedWords, interpreted


class Blocks(NamedTuple):
    """Blocks of pairs with one expert each. Without `pairs` every pair is a block by itself."""

    experts: Tensor  # [blocks] int32; unused blocks have none of the experts, and are the last
    pairs: Tensor | None = None  # [blocks * block_m] int32, those past the last of an expert are the number of pairs


@triton.jit
def _rounded_columns(
    first, second, codes, scale, scale_stride, group, i, inside, K: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write the codes of columns that are pairs of a word, [groups, pairs], and each group's scale."""
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
    s = tl.where(largest == 0, 1.0, largest / LARGEST)
    pair = _pair(first / s[:, None], second / s[:, None], LARGEST, INTERPRETED)
    tl.store(codes + (group[:, None] * (GROUP // 2) + i[None, :]), pair, mask=inside)
    tl.store(scale + group * scale_stride, s, mask=group < K // GROUP)


@triton.jit(do_not_specialize=["sums_stride", "scale_stride"])
def _norm_and_round_kernel(
    x,  # [T, K]
    partial_sums,  # [SPLITS, T, K]
    norm_weight,  # [K]
    normed,  # [T, K], written
    codes,  # [T, K / 2], written, in pairs
    scale,  # [groups, T], written
    sums_stride,  # of a split
    scale_stride,
    eps,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM: tl.constexpr,  # groups, and columns of half a group, rounded up to powers of two
    HALF: tl.constexpr,
    DISTANCE: tl.constexpr,
    SPLITS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one token. In the order of words, columns that are DISTANCE apart are neighbours."""
    token = tl.program_id(0).to(tl.int64)
    group, i = tl.arange(0, NUM), tl.arange(0, HALF)
    inside = (group < K // GROUP)[:, None] & (i < GROUP // 2)[None, :]
    column = group[:, None] * GROUP + (i // DISTANCE * (2 * DISTANCE) + i % DISTANCE)[None, :]
    first_weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(norm_weight + column + DISTANCE, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = x + token * K
    first = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + column + DISTANCE, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        sums = partial_sums + token * K
        first = _with_sums(row, first, sums, column, inside, sums_stride, SPLITS)
        second = _with_sums(row, second, sums, column + DISTANCE, inside, sums_stride, SPLITS)
    rstd = tl.rsqrt(tl.sum(tl.sum(first * first + second * second, axis=1), axis=0) / K + eps)
    first = (first * rstd * first_weight).to(x.dtype.element_ty)
    second = (second * rstd * second_weight).to(x.dtype.element_ty)
    tl.store(normed + token * K + column, first, mask=inside)
    tl.store(normed + token * K + column + DISTANCE, second, mask=inside)
    _rounded_columns(
        first.to(tl.float32), second.to(tl.float32), codes + token * (K // 2), scale + token, scale_stride, group, i,
        inside, K, GROUP, LARGEST, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "scale_stride"])
def _round_slots_kernel(
    x,  # [slots, K]
    block_experts,  # [blocks]
    pairs,  # [slots], or None
    codes,  # [slots, K / 2], written, in pairs
    scale,  # [groups, slots], written
    num_pairs,
    scale_stride,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM: tl.constexpr,
    HALF: tl.constexpr,
    DISTANCE: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # this kernel begins after the blocks were written
    expert = tl.load(block_experts + slot // BLOCK_M)
    used = (expert >= 0) & (expert < NUM_EXPERTS)
    if pairs is not None:
        used &= tl.load(pairs + slot) < num_pairs
    if not used:
        return
    group, i = tl.arange(0, NUM), tl.arange(0, HALF)
    inside = (group < K // GROUP)[:, None] & (i < GROUP // 2)[None, :]
    column = group[:, None] * GROUP + (i // DISTANCE * (2 * DISTANCE) + i % DISTANCE)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.load(x + slot * K + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + slot * K + column + DISTANCE, mask=inside, other=0.0).to(tl.float32)
    _rounded_columns(
        first, second, codes + slot * (K // 2), scale + slot, scale_stride, group, i, inside, K, GROUP, LARGEST,
        INTERPRETED,
    )  # fmt: skip


def empty_rounded(rows: int, weight: PackedWords) -> RoundedInputs:
    """For inputs of a weight."""
    words = weight.words
    codes = torch.empty(rows, weight.shape[-1], dtype=torch.float8_e4m3fn, device=words.device)
    return RoundedInputs(codes, torch.empty(weight.scale.shape[-1], rows, dtype=torch.float32, device=words.device))


def _constants(weight: PackedWords) -> dict[str, Any]:
    k, groups = weight.shape[-1], weight.scale.shape[-1]
    sizes = {"NUM": next_power_of_2(groups), "HALF": next_power_of_2(k // groups // 2)}
    return {"K": k, "GROUP": k // groups, "DISTANCE": weight.distance, "LARGEST": LARGEST, **sizes}


def norm_and_round(
    x: Tensor,  # [T, K]
    norm_weight: Tensor,  # [K]
    eps: float,
    weight: PackedWords,  # whose inputs are rounded
    *,
    partial_sums: Tensor | None = None,  # [splits, T, K], float32 or of x's type: added to x in place, before the norm
    pdl: bool = False,
) -> tuple[Tensor, RoundedInputs]:
    """The RMS norm of x, and the same rounded."""
    num_tokens, k = x.shape
    assert x.is_contiguous() and (partial_sums is None or partial_sums.is_contiguous())
    normed, rounded = torch.empty_like(x), empty_rounded(num_tokens, weight)
    constants = _constants(weight)
    launch(
        _norm_and_round_kernel,
        (num_tokens,),
        x,
        partial_sums,
        norm_weight,
        normed,
        rounded.codes.view(torch.uint16),
        rounded.scale,
        x.numel(),
        rounded.scale.stride(0),
        eps,
        **constants,
        SPLITS=0 if partial_sums is None else partial_sums.shape[0],
        INTERPRETED=interpreted(_norm_and_round_kernel),
        PDL=pdl,
        num_warps=min(32, max(1, constants["NUM"] * constants["HALF"] // 64)),
        pdl=pdl,
    )
    return normed, rounded


def round_slots(
    x: Tensor,  # [slots, K]
    blocks: Blocks,
    num_pairs: int,
    weight: PackedWords,  # whose inputs are rounded
    *,
    pdl: bool = False,
) -> RoundedInputs:
    """Writes nothing for slots without a pair. The kernel before this one begins after `blocks` were written."""
    slots, k = x.shape
    rounded = empty_rounded(slots, weight)
    launch(
        _round_slots_kernel,
        (slots,),
        x,
        *blocks,
        rounded.codes.view(torch.uint16),
        rounded.scale,
        num_pairs,
        rounded.scale.stride(0),
        NUM_EXPERTS=weight.shape[0],
        BLOCK_M=slots // len(blocks.experts),
        **_constants(weight),
        INTERPRETED=interpreted(_round_slots_kernel),
        PDL=pdl,
        num_warps=max(1, min(8, next_power_of_2(k) // 256)),
        pdl=pdl,
    )
    return rounded
