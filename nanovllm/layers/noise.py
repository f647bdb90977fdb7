"""Gumbel noise that depends on (seed, position, token) alone.

It comes from a counter-based generator, so a request draws the same noise whatever it is batched with, on every device
and every rank.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive ids over the whole range
MASK = 0xFFFFFFFF
BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


def mix(x: Tensor) -> Tensor:
    """A 32-bit finalizer on int64 tensors that hold 32-bit values: every input bit changes half of the output bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def noise_keys(seed: Tensor, positions: Tensor) -> Tensor:  # [rows] each -> [rows] 32-bit values
    low, high = seed & MASK, (seed >> 32) & MASK
    return mix(mix(mix(low) ^ high) ^ (positions * GOLDEN & MASK))


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise for tokens [rows, n] (or [n], for all rows alike) of rows with these keys: float32 [rows, n]."""
    x = keys[:, None].to(torch.int32) + token_ids.to(torch.int32) * (GOLDEN - 2**32)
    # the same finalizer in wrapping 32-bit arithmetic; a shift of a negative number brings in ones, hence the masks
    x = (x ^ ((x >> 16) & 0xFFFF)).mul_(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    # -log(1 - u) for u in (0, 1): finest where it is small, which is where the noise is large and decides the race
    exponential = (x & 0x7FFFFFFF).float().add_(0.5).mul_(-BELOW_ONE / 2**31).log1p_().neg_()
    return exponential.log_().neg_()
