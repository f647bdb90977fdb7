"""Gumbel-max sampling straight from the logits, and the thresholds of top-k, top-p and min-p without a sort.

The reference is `layers.sampler`: the same noise, keyed by (seed, position, token), the same cuts, the same winner.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from nanovllm.kernels.launch import cdiv, launch

LOG2_E = tl.constexpr(1.4426950408889634)
GOLDEN = tl.constexpr(0x9E3779B9)
UNIT = tl.constexpr((1 - 2**-24) / 2**31)  # brings 31 bits into [0, 1)
MAX_ID = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of all finite float32
CHUNK = tl.constexpr(8)  # neighbouring tokens of which only the best score is kept until the row's winner is known

SMALL_BATCH = 16  # up to here the vocabulary is dealt out to more and smaller programs
NUM_PROCESSORS = 128
GROUPS_PER_WARP = 256
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # trailing zeros of such a value in float32


# --- the draw ---------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    """The 32-bit finalizer of the reference, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """One instruction instead of twenty, wrong by at most 2^-22 of 1 or of the result."""
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def _gumbel(key, token, FAST: tl.constexpr):
    """Gumbel noise in units of log 2, up to a constant that is the same for all tokens."""
    bits = _mix(key + token.to(tl.uint32) * GOLDEN) & 0x7FFFFFFF
    u = bits.to(tl.int32).to(tl.float32) * UNIT + 0.5 * UNIT
    # -log2(1 - u): near 1 a logarithm has lost the digits that decide the race, four terms of its series have not
    series = u * (u * (u * (u * (LOG2_E / 4) + LOG2_E / 3) + LOG2_E / 2) + LOG2_E)
    return -_log2(tl.where(u < 0.0625, series, -_log2(1.0 - u, FAST)), FAST)


@triton.jit
def _scores(logits, token, vocab_size, threshold, temperature, key, FAST: tl.constexpr):
    """What the winner has most of: the logit itself for greedy rows."""
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    draws = temperature > 0
    if threshold is not None:
        x = tl.where(x < threshold, float("-inf"), x)
        draws = draws & (tl.max(x) > float("-inf"))  # few tiles have a token above it
    if draws:
        x = x * (1 / temperature * LOG2_E) + _gumbel(key, token, FAST)
    return x


@triton.jit
def _ordered(x):
    """Float32 as int64 in [0, 2^32) of the same order."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 0x80000000)


@triton.jit
def _sample_kernel(
    logits,  # [B, V]
    rows,  # [B]
    tokens,  # [R, max_len]
    length,  # [R]
    temperature,  # [R]
    seed_low,  # [R]
    seed_high,  # [R]
    thresholds,  # [B] or None
    out,
    scratch,  # [B, 2] best so far, programs done
    vocab_size,
    logits_stride,
    tokens_stride,
    TILE: tl.constexpr,
    FAST: tl.constexpr,  # not known to the interpreter
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(1)
    row = tl.load(rows + index)
    if row > 0:
        position = tl.load(length + row)
        low = tl.load(seed_low + row).to(tl.uint32, bitcast=True)
        high = tl.load(seed_high + row).to(tl.uint32, bitcast=True)
        key = _mix(_mix(_mix(low) ^ high) ^ (position.to(tl.uint32) * GOLDEN))
        heat = tl.load(temperature + row)
        threshold = None if thresholds is None else tl.load(thresholds + index)
        row_logits = logits + index.to(tl.int64) * logits_stride

        chunk = tl.program_id(0) * (TILE // CHUNK) + tl.arange(0, TILE // CHUNK)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        scores = tl.max(_scores(row_logits, token, vocab_size, threshold, heat, key, FAST), axis=1)
        best = tl.max(scores)
        chunk = tl.min(tl.where(scores == best, chunk, (vocab_size - 1) // CHUNK))  # in range even if all are NaN
        # one number, larger for a better score, then for smaller ids: a single atomic finds the best of all tiles
        packed = (_ordered(best) << 31) | (chunk ^ MAX_ID).to(tl.int64)
        tl.atomic_max(scratch + 2 * index, packed)

        if tl.atomic_add(scratch + 2 * index + 1, 1) == tl.num_programs(0) - 1:  # the last program of this row
            packed = tl.atomic_xchg(scratch + 2 * index, 0)
            tl.store(scratch + 2 * index + 1, 0)
            finalist = ((packed & MAX_ID) ^ MAX_ID).to(tl.int32) * CHUNK + tl.arange(0, CHUNK)
            final = _scores(row_logits, finalist, vocab_size, threshold, heat, key, FAST)
            winner = tl.min(tl.where(final == tl.max(final), finalist, vocab_size - 1))
            tl.store(tokens + row.to(tl.int64) * tokens_stride + position, winner)
            tl.store(length + row, position + 1)
            tl.store(out + index, winner)


def sample(
    logits: Tensor,  # [B, V]
    *,
    rows: Tensor,  # [B] int32, 0 = padding: nothing is written
    tokens: Tensor,  # [R, max_len] int32; the new token is appended
    length: Tensor,  # [R] int32, advanced
    temperature: Tensor,  # [R] float32, 0 = greedy
    seed_low: Tensor,  # [R] int32
    seed_high: Tensor,  # [R] int32
    thresholds: Tensor | None,  # [B] float32: logits below take no part
    out: Tensor,  # [at least B] int32
    scratch: Tensor,  # [at least B, 2] int64, zeros; left as zeros
    pdl: bool = False,
) -> None:
    """One token a row: the argmax of logits / temperature + noise, the smallest id among equals."""
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1 and tokens.stride(1) == 1
    tile = 1024 if batch <= SMALL_BATCH else 4096
    launch(
        _sample_kernel,
        (cdiv(vocab_size, tile), batch),
        logits,
        rows,
        tokens,
        length,
        temperature,
        seed_low,
        seed_high,
        thresholds,
        out,
        scratch,
        vocab_size,
        logits.stride(0),
        tokens.stride(0),
        TILE=tile,
        FAST=logits.is_cuda,
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )


# --- top-k, top-p, min-p ----------------------------------------------------------------------------------------------
#
# The cut is the largest value at which the amount of what lies at or above it reaches what is needed: for top-k the
# number of tokens, for top-p their mass. It is found by bisection over integers that order the values of the logits'
# type. One pass over the row keeps the best four logits of each of many groups of tokens; where no group can have a
# fifth one above the cut, these decide without looking at the row again.


@triton.jit
def _key(x, UNUSED: tl.constexpr):
    """A float32 value as an int64 of the same order; neighbours among the logits' values are neighbouring integers."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> UNUSED).to(tl.int64)


@triton.jit
def _value(key, UNUSED: tl.constexpr):
    bits = (key << UNUSED).to(tl.int32)
    bits = tl.where(bits < 0, (bits ^ 0x7FFFFFFF) & (-1 << UNUSED), bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, start, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    token = start + tl.arange(0, TILE)
    return tl.load(logits + token, mask=token < VOCAB_SIZE, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(x, top, scale, MASS: tl.constexpr):
    """What each token adds to the amount; the most likely token has mass 1."""
    if MASS:
        return tl.exp2((x - top) * scale)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _best_of_groups(logits, VOCAB_SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """The four largest logits of each group, largest first: 4 times [GROUPS]."""
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
    """The key of the cut, going by the best of the groups; never above that of the row."""
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
    """The bounds of the search after trying a key between them."""
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
    """The key of the cut, given a key not above it.

    Each pass over the row tries four: three that quarter the values, which is what logits are spread over evenly, and
    one that halves the keys, which bounds the number of passes.
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
        beyond = tl.max(d)  # what is not among the best of its group is not above this
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
            # if all tokens were this unlikely, together they would be half of what top-p may leave out
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
    """The logit below which a token is cut, by top-k, then by top-p among the rest, and by min-p; -inf cuts none."""
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_warps = 16 if batch <= NUM_PROCESSORS else 8  # a processor holds one row, or two
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
