"""Unpack a weight to 16 or 32 bits once, for products with so many rows that these take longer than writing and reading
the unpacked weight does."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.packed import PackedWords, interpreted, numbers, scales, zeros_of

BLOCK_N = 4


@triton.jit
def _packed_dequantize_kernel(
    words,
    scale,
    zero,
    minimum,
    scale_unit,
    minimum_unit,
    out,
    N,
    K: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    DISTANCE: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPANS: tl.constexpr,  # per program
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per BLOCK_N rows and SPANS spans of columns."""
    SPAN: tl.constexpr = DISTANCE * PAIRS
    HALF: tl.constexpr = DISTANCE // 2
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    word = tl.program_id(1) * (SPANS * HALF) + tl.arange(0, SPANS * HALF)[None, :]
    inside = (n < N) & (word < K // (2 * PAIRS))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    codes = tl.load(words + n.to(tl.int64) * (K // (2 * PAIRS)) + word, mask=inside, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()  # an earlier kernel may still read the memory that `out` reuses
    for pair in tl.static_range(PAIRS):
        column = word // HALF * SPAN + pair * DISTANCE + word % HALF * 2
        group = column // (K // GROUPS)
        s = scales(scale, scale_unit, n, group, inside, GROUPS, UNITS, SCALE_ROWS)
        zeros = None
        if zero is not None or KIND == "int4":
            zeros = zeros_of(zero, minimum, n, group, inside, GROUPS, KIND)
        low, high = tl.split(numbers(codes, zeros, pair, KIND, tl.bfloat16, INTERPRETED))
        low, high = low.to(tl.float32) * s, high.to(tl.float32) * s
        if minimum is not None:
            less = scales(minimum, minimum_unit, n, group, inside, GROUPS, UNITS, 1)
            low, high = low - less, high - less
        both = tl.reshape(tl.join(low, high), (BLOCK_N, SPANS * HALF * 2)).to(out.dtype.element_ty)
        # the columns of the two are adjacent, and so are those of all words of a span
        item = tl.arange(0, SPANS * HALF * 2)[None, :] + tl.program_id(1) * (SPANS * DISTANCE)
        to = item // DISTANCE * SPAN + pair * DISTANCE + item % DISTANCE
        tl.store(out + n.to(tl.int64) * K + to, both, mask=(n < N) & (item < K // PAIRS))


def packed_dequantize(weight: PackedWords, dtype: torch.dtype, *, pdl: bool = False) -> Tensor:
    """[..., N, K] of `dtype`."""
    k, num_rows = weight.shape[-1], weight.words.numel() // weight.words.shape[-1]
    assert weight.scale_rows == 1 or weight.words.dim() == 2 or weight.shape[-2] % weight.scale_rows == 0
    out = torch.empty(weight.shape, dtype=dtype, device=weight.words.device)
    spans = 4  # 128 words in a row
    num_words = weight.words.shape[-1]
    launch(
        _packed_dequantize_kernel,
        (cdiv(num_rows, BLOCK_N), cdiv(num_words, spans * weight.distance // 2)),
        *weight.pointers,
        out,
        num_rows,
        K=k,
        **weight.constants,
        BLOCK_N=BLOCK_N,
        SPANS=spans,
        INTERPRETED=interpreted(_packed_dequantize_kernel),
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
    return out
