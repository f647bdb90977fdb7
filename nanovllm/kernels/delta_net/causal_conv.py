"""Causal convolution over the sequences of a step, in which every channel has its own filter.

The plain form is `layers/causal_conv.py`. Steps in which all sequences have few new tokens take one launch, with a
program for each sequence that also replaces its state. In others every token has a program, and since another one may
still read a state, a second launch replaces the states.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.delta_net.conv_inputs import convolved, store_newest_inputs
from nanovllm.kernels.delta_net.sequences import OF_ANY_ALIGNMENT, NewTokens
from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

TILE_TOKENS, TILE_CHANNELS = 8, 256
STEP_CHANNELS = 256  # of a program that has one sequence


@triton.jit
def _store_results(
    x,
    times,
    after,
    weight,
    bias,
    before,
    out,
    first,
    number,
    channel,
    inside,
    kept,
    x_stride,
    channels,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ALL_NEW: tl.constexpr,
):
    """Convolution, bias, SiLU, and with GATED the product with `after`, rounded before as a tensor would be."""
    y = convolved(
        x, times, before, weight, first, number, channel, inside, kept, x_stride, channels, KERNEL, GATED, ALL_NEW
    )
    token = first + number
    if BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y * tl.sigmoid(y)
    if GATED:
        y = y.to(after.dtype.element_ty).to(tl.float32)
        y = y * tl.load(after + token * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * channels + channel, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _conv_tokens_kernel(
    x,
    times,
    after,
    weight,
    bias,
    state,
    out,
    rows,
    starts,
    first_tokens,
    token_seqs,
    num_tokens,
    x_stride,
    state_stride,
    channels,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    used = token < num_tokens
    inside = used & (channel < channels)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.load(token_seqs + token, mask=used, other=0)
    first = tl.load(first_tokens + seq, mask=used, other=0).to(tl.int64)
    start = tl.load(starts + seq, mask=used, other=-1)
    row = tl.load(rows + seq, mask=used, other=0).to(tl.int64)
    before = state + row * state_stride
    number = token - first
    kept = tl.where(start > 0, channels, 0)
    if tl.min(tl.where(used, number, KERNEL)) >= KERNEL - 1:
        _store_results(
            x,
            times,
            after,
            weight,
            bias,
            before,
            out,
            first,
            number,
            channel,
            inside,
            kept,
            x_stride,
            channels,
            KERNEL=KERNEL,
            SILU=SILU,
            BIAS=BIAS,
            GATED=GATED,
            ALL_NEW=True,
        )
    else:
        _store_results(
            x,
            times,
            after,
            weight,
            bias,
            before,
            out,
            first,
            number,
            channel,
            inside,
            kept,
            x_stride,
            channels,
            KERNEL=KERNEL,
            SILU=SILU,
            BIAS=BIAS,
            GATED=GATED,
            ALL_NEW=False,
        )


@triton.jit(do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _conv_steps_kernel(
    x,
    times,
    after,
    weight,
    bias,
    state,
    out,
    rows,
    starts,
    first_tokens,
    num_new,
    x_stride,
    state_stride,
    channels,
    COMPUTES: tl.constexpr,  # False: only the states are replaced
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    first = tl.load(first_tokens + seq).to(tl.int64)
    num = tl.load(num_new + seq)
    before = state + tl.load(rows + seq).to(tl.int64) * state_stride
    if PDL:
        tl.extra.cuda.gdc_wait()
    start = tl.load(starts + seq)  # an early kernel of a decode step writes it
    if COMPUTES:
        kept = tl.where(start > 0, channels, 0)
        for number in range(num):
            _store_results(
                x,
                times,
                after,
                weight,
                bias,
                before,
                out,
                first,
                number,
                channel,
                inside,
                kept,
                x_stride,
                channels,
                KERNEL=KERNEL,
                SILU=SILU,
                BIAS=BIAS,
                GATED=GATED,
                ALL_NEW=False,
            )
    store_newest_inputs(
        x, times, before, first, num, channel, inside, start, x_stride, channels, KERNEL=KERNEL, TAPS=TAPS, GATED=GATED
    )


def causal_conv(
    x: Tensor,  # [num_tokens, channels], maybe columns of a wider tensor
    weight: Tensor,  # [channels, 1, kernel_size]
    bias: Tensor | None,  # [channels]
    state: Tensor,  # [rows, kernel_size - 1, channels] float32, replaced
    sequences: NewTokens,
    *,
    silu: bool = False,
    times_and_after: tuple[Tensor, Tensor] | None = None,  # as x: what is multiplied with x, and with the result
    few: bool = False,  # all sequences have few tokens
    pdl: bool = False,
) -> Tensor:
    """[num_tokens, channels]"""
    (num_tokens, channels), kernel_size = x.shape, weight.shape[2]
    gated = times_and_after is not None
    times, after = (x, x) if times_and_after is None else times_and_after
    assert x.stride(1) == 1 and times.stride() == after.stride() == x.stride()
    assert weight.is_contiguous() and state.stride()[1:] == (channels, 1)
    out = x.new_empty(x.shape)
    tensors = x, times, after, weight, x if bias is None else bias, state, out
    ranges = sequences.rows, sequences.starts, sequences.first_tokens
    sizes = x.stride(0), state.stride(0), channels
    options: dict[str, Any] = dict(
        KERNEL=kernel_size, SILU=silu, BIAS=bias is not None, GATED=gated, PDL=pdl, num_warps=4, pdl=pdl
    )
    if not few:
        tiles = cdiv(num_tokens, TILE_TOKENS), cdiv(channels, TILE_CHANNELS)
        arguments = (*tensors, *ranges, sequences.token_seqs, num_tokens, *sizes)
        launch(_conv_tokens_kernel, tiles, *arguments, TOKENS=TILE_TOKENS, BLOCK=TILE_CHANNELS, **options)
    launch(
        _conv_steps_kernel,
        (len(sequences.rows), cdiv(channels, STEP_CHANNELS)),
        *tensors,
        *ranges,
        sequences.num_new,
        *sizes,
        COMPUTES=few,
        TAPS=next_power_of_2(kernel_size - 1),
        BLOCK=STEP_CHANNELS,
        **options,
    )
    return out
