"""Gumbel-max sampling from the logits, in one launch.

The reference is layers/sampler.py: the same noise, keyed by (seed, position, token), and the same token.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from nanovllm.kernels.launch import cdiv, launch

LOG2_E = tl.constexpr(1.4426950408889634)
GOLDEN = tl.constexpr(0x9E3779B9)
UNIT = tl.constexpr((1 - 2**-24) / 2**31)  # maps 31 bits to [0, 1)
MAX_ID = tl.constexpr(2**31 - 1)
CHUNK = tl.constexpr(8)  # adjacent tokens; the reduction keeps the best score per chunk, not its token

SMALL_BATCH = 16  # up to this batch size the vocabulary is divided into smaller tiles


@triton.jit
def _mix(x):
    """The 32-bit hash finalizer of the reference, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """FAST uses one instruction instead of twenty; its error is at most 2^-22, absolute or relative."""
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def _gumbel(key, token, FAST: tl.constexpr):
    """Gumbel noise in units of log 2, up to a constant that is equal for all tokens."""
    bits = _mix(key + token.to(tl.uint32) * GOLDEN) & 0x7FFFFFFF
    u = bits.to(tl.int32).to(tl.float32) * UNIT + 0.5 * UNIT
    # -log2(1 - u): for small u the rounding of 1 - u loses the digits that decide the winner; four terms of the series
    # keep them
    series = u * (u * (u * (u * (LOG2_E / 4) + LOG2_E / 3) + LOG2_E / 2) + LOG2_E)
    return -_log2(tl.where(u < 0.0625, series, -_log2(1.0 - u, FAST)), FAST)


@triton.jit
def _scores(logits, token, vocab_size, threshold, temperature, key, FAST: tl.constexpr):
    """logit / temperature + noise, in units of log 2; the logit for greedy rows. The largest score wins."""
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    draws = temperature > 0
    if threshold is not None:
        x = tl.where(x < threshold, float("-inf"), x)
        draws = draws & (tl.max(x) > float("-inf"))  # skip the noise in tiles without a candidate
    if draws:
        x = x * (1 / temperature * LOG2_E) + _gumbel(key, token, FAST)
    return x


@triton.jit
def _ordered(x):
    """Map float32 to int64 in [0, 2^32), preserving order."""
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
    scratch,  # [B, 2]: packed best score so far, number of programs done
    vocab_size,
    logits_stride,
    tokens_stride,
    TILE: tl.constexpr,
    FAST: tl.constexpr,  # not supported by the interpreter
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
        # score and chunk packed into one number, larger for a better score, then for a smaller chunk: one atomic max
        # finds the best of all tiles
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
    rows: Tensor,  # [B] int32; 0: padding, nothing is written
    tokens: Tensor,  # [R, max_len] int32, the new token is appended
    length: Tensor,  # [R] int32, advanced
    temperature: Tensor,  # [R] float32, 0 = greedy
    seed_low: Tensor,  # [R] int32
    seed_high: Tensor,  # [R] int32
    thresholds: Tensor | None,  # [B] float32: tokens with smaller logits are excluded
    out: Tensor,  # [at least B] int32
    scratch: Tensor,  # [at least B, 2] int64, zero before and after
    pdl: bool = False,
) -> None:
    """Sample one token per row: the argmax of logits / temperature + noise, the smallest id among equals."""
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
