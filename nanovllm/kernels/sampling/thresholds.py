"""Thresholds of top-k, top-p and min-p without sorting: the logit below which a token is excluded.

The reference is layers/sampler_cuts.py. The threshold is the largest value at which the amount at or above it reaches
what is needed: the number of tokens for top-k, their probability mass for top-p. It is found by bisection over integers
that have the same order as the logits' values. A first pass over the row keeps the four largest logits of each of many
groups of tokens. If no group can have a fifth logit above the threshold, these decide and the row is not read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launch

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the smallest finite float32

NUM_SMS = 128
GROUPS_PER_WARP = 256
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # trailing zero bits of such a value in float32


@triton.jit
def _key(x, UNUSED: tl.constexpr):
    """Map float32 to int64, preserving order. Adjacent values of the logits' type become adjacent integers."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> UNUSED).to(tl.int64)


@triton.jit
def _value(key, UNUSED: tl.constexpr):
    """The inverse of `_key`."""
    bits = (key << UNUSED).to(tl.int32)
    bits = tl.where(bits < 0, (bits ^ 0x7FFFFFFF) & (-1 << UNUSED), bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, start, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    token = start + tl.arange(0, TILE)
    return tl.load(logits + token, mask=token < VOCAB_SIZE, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(x, top, scale, MASS: tl.constexpr):
    """What each token adds to the amount: 1, or its probability mass relative to the most likely token."""
    if MASS:
        return tl.exp2((x - top) * scale)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _best_of_groups(logits, VOCAB_SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """The four largest logits of each group, largest first: four tensors [GROUPS]."""
    a = tl.full([GROUPS], float("-inf"), tl.float32)
    b, c, d = a, a, a
    for start in tl.range(0, VOCAB_SIZE, GROUPS, num_stages=3):
        x = _load(logits, start, VOCAB_SIZE, GROUPS)
        x, a = tl.minimum(a, x), tl.maximum(a, x)
        x, b = tl.minimum(b, x), tl.maximum(b, x)
        x, c = tl.minimum(c, x), tl.maximum(c, x)
        d = tl.maximum(d, x)
    return a, b, c, d


@triton.jit
def _amount_of_best(a, b, c, d, cut, top, scale, MASS: tl.constexpr):
    amounts = tl.where(a >= cut, _weights(a, top, scale, MASS), 0.0)
    amounts += tl.where(b >= cut, _weights(b, top, scale, MASS), 0.0)
    amounts += tl.where(c >= cut, _weights(c, top, scale, MASS), 0.0)
    amounts += tl.where(d >= cut, _weights(d, top, scale, MASS), 0.0)
    return tl.sum(amounts)


@triton.jit
def _search_best(a, b, c, d, low, needed, top, scale, MASS: tl.constexpr, UNUSED: tl.constexpr):
    """The key of the threshold by the best logits of the groups alone; never above that of the whole row."""
    high = _key(top, UNUSED) + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        if _amount_of_best(a, b, c, d, _value(middle, UNUSED), top, scale, MASS) >= needed:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _mass_of_row(logits, cut, top, scale, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    masses = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, VOCAB_SIZE, TILE, num_stages=3):
        x = _load(logits, start, VOCAB_SIZE, TILE)
        masses += tl.where(x >= cut, _weights(x, top, scale, True), 0.0)
    return tl.sum(masses)


@triton.jit
def _narrow(low, high, key, amount, needed):
    """The search bounds after trying a key between them."""
    enough = amount >= needed
    return tl.where(enough, tl.maximum(low, key), low), tl.where(enough, high, tl.minimum(high, key))


@triton.jit
def _search_row(
    logits,
    low,
    needed,
    top,
    scale,
    MASS: tl.constexpr,
    UNUSED: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The key of the threshold, given a lower bound.

    Each pass over the row tries four candidates: three that divide the range of values into quarters, because logits
    are spread evenly over values, and one that halves the range of keys, which bounds the number of passes.
    """
    high = _key(top, UNUSED) + 1
    while high - low > 1:
        value = _value(low, UNUSED)
        quarter = (_value(high - 1, UNUSED) - value) / 4
        first = tl.minimum(tl.maximum(_key(value + quarter, UNUSED), low + 1), high - 1)
        second = tl.minimum(tl.maximum(_key(value + 2 * quarter, UNUSED), low + 1), high - 1)
        third = tl.minimum(tl.maximum(_key(value + 3 * quarter, UNUSED), low + 1), high - 1)
        middle = low + ((high - low) >> 1)
        first_cut, second_cut = _value(first, UNUSED), _value(second, UNUSED)
        third_cut, middle_cut = _value(third, UNUSED), _value(middle, UNUSED)
        at_first = tl.zeros([TILE], tl.float32)
        at_second, at_third, at_middle = at_first, at_first, at_first
        for start in tl.range(0, VOCAB_SIZE, TILE, num_stages=3):
            x = _load(logits, start, VOCAB_SIZE, TILE)
            weights = _weights(x, top, scale, MASS)
            at_first += tl.where(x >= first_cut, weights, 0.0)
            at_second += tl.where(x >= second_cut, weights, 0.0)
            at_third += tl.where(x >= third_cut, weights, 0.0)
            at_middle += tl.where(x >= middle_cut, weights, 0.0)
        low, high = _narrow(low, high, first, tl.sum(at_first), needed)
        low, high = _narrow(low, high, second, tl.sum(at_second), needed)
        low, high = _narrow(low, high, third, tl.sum(at_third), needed)
        low, high = _narrow(low, high, middle, tl.sum(at_middle), needed)
    return low


@triton.jit
def _cut_kernel(
    logits,  # [B, V]
    rows,  # [B]
    temperature,  # [R]
    top_k,  # [R]
    top_p,  # [R]
    min_p,  # [R]
    out,  # [B]
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    UNUSED: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    row = tl.load(rows + index)
    heat = tl.load(temperature + row)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    by_k = (k > 0) & (k < VOCAB_SIZE)
    if (row > 0) & (heat > 0) & (by_k | (p < 1) | (least > 0)):
        row_logits = logits + index.to(tl.int64) * logits_stride
        a, b, c, d = _best_of_groups(row_logits, VOCAB_SIZE, GROUPS)
        top = tl.max(a)
        beyond = tl.max(d)  # no logit outside the groups' best four is above this
        scale = 1 / heat * LOG2_E
        low = _key(tl.full([], LOWEST, tl.float32), UNUSED)
        if by_k:
            low = _search_best(a, b, c, d, low, k, top, scale, False, UNUSED)
            if beyond >= _value(low, UNUSED):
                low = _search_row(row_logits, low, k, top, scale, False, UNUSED, VOCAB_SIZE, GROUPS)
        if p < 1:
            cut = _value(low, UNUSED)
            if beyond >= cut:
                mass = _mass_of_row(row_logits, cut, top, scale, VOCAB_SIZE, GROUPS)
            else:
                mass = _amount_of_best(a, b, c, d, cut, top, scale, True)
            # a lower bound: if all tokens had this logit, their mass would be half of what top-p may exclude
            least_value = top + tl.log2((1 - p) * mass / (2 * VOCAB_SIZE)) / scale
            low = tl.maximum(low, _key(tl.maximum(least_value, LOWEST), UNUSED) - 1)
            low = _search_best(a, b, c, d, low, p * mass, top, scale, True, UNUSED)
            if beyond >= _value(low, UNUSED):
                low = _search_row(row_logits, low, p * mass, top, scale, True, UNUSED, VOCAB_SIZE, GROUPS)
        threshold = _value(low, UNUSED)
        if least > 0:
            threshold = tl.maximum(threshold, top + tl.log2(least) / scale)
        tl.store(out + index, threshold)
    else:
        tl.store(out + index, float("-inf"))


def cut_thresholds(
    logits: Tensor,  # [B, V]
    *,
    rows: Tensor,  # [B] int32, 0 = padding
    temperature: Tensor,  # [R] float32, 0 = greedy
    top_k: Tensor,  # [R] int32, 0 or V = off
    top_p: Tensor,  # [R] float32, 1 = off
    min_p: Tensor,  # [R] float32, 0 = off
    out: Tensor,  # [B] float32, written
    pdl: bool = False,
) -> None:
    """The logit below which a token is excluded: by top-k, then by top-p among the rest, and by min-p; -inf: none."""
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_warps = 16 if batch <= NUM_SMS else 8  # one row per SM, or two
    launch(
        _cut_kernel,
        (batch,),
        logits,
        rows,
        temperature,
        top_k,
        top_p,
        min_p,
        out,
        logits.stride(0),
        VOCAB_SIZE=vocab_size,
        UNUSED=UNUSED_BITS[logits.dtype],
        GROUPS=GROUPS_PER_WARP * num_warps,
        PDL=pdl,
        num_warps=num_warps,
        pdl=pdl,
    )
