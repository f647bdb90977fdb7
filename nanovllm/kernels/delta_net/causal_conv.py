"""Causal convolution over the sequences of a step, in which every channel has its own filter.

The plain form is `layers/causal_conv.py`. Steps in which all sequences have few new tokens take one launch, with a
program for each sequence that also replaces its state. In others a program has a tile of tokens, and since another one
may still read a state, a second launch replaces the states.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.delta_net.conv_inputs import convolved, load_new_inputs, store_newest_inputs
from nanovllm.kernels.delta_net.sequences import OF_ANY_ALIGNMENT, NewTokens
from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

TILE_TOKENS, TILE_CHANNELS = 8, 512
PART_CHANNELS = 128  # of a tile, computed at once where a token needs inputs of a state
STEP_CHANNELS = 256  # of a program that has one sequence
FEW_SEQS, FEW_SEQS_CHANNELS = 16, 128  # with up to so many sequences


@triton.jit
def _finished(y, bias, factor, DTYPE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr):
    """With bias, SiLU, and with GATED the product with `factor`, rounded before as a tensor would be."""
    if BIAS:
        y += bias
    if SILU:
        y = y * tl.sigmoid(y)
    if GATED:
        y = y.to(DTYPE).to(tl.float32) * factor.to(tl.float32)
    return y.to(DTYPE)


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
):
    """The results for the inputs with these numbers; arguments as those of `load_inputs`."""
    y = convolved(x, times, before, weight, first, number, channel, inside, kept, x_stride, channels, KERNEL, GATED)
    token = first + number
    added, factor = 0.0, 0.0
    if BIAS:
        added = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    if GATED:
        factor = tl.load(after + token * x_stride + channel, mask=inside, other=0.0)
    y = _finished(y, added, factor, out.dtype.element_ty, BIAS, SILU, GATED)
    tl.store(out + token * channels + channel, y, mask=inside)


@triton.jit
def _store_run(
    x,
    times,
    after,
    weight,
    bias,
    out,
    token,
    channel,
    x_stride,
    channels,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The results of TOKENS tokens of one sequence, from `token` on, that need no input of its state.

    Every input is loaded once, and all before the first result is stored: loads are not moved ahead of a store.
    """
    inside = channel < channels
    values: tl.tuple = ()
    factors: tl.tuple = ()
    taps: tl.tuple = ()
    added = 0.0
    if BIAS:
        added = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for index in tl.static_range(TOKENS + KERNEL - 1):
        at = (token + index - (KERNEL - 1)) * x_stride + channel
        values += (load_new_inputs(x, times, at, inside, GATED),)
    for index in tl.static_range(TOKENS):
        factor = 0.0
        if GATED:
            factor = tl.load(after + (token + index) * x_stride + channel, mask=inside, other=0.0)
        factors += (factor,)
    for tap in tl.static_range(KERNEL):
        taps += (tl.load(weight + channel * KERNEL + tap, mask=inside, other=0.0).to(tl.float32),)
    for index in tl.static_range(TOKENS):
        y = taps[KERNEL - 1] * values[index + KERNEL - 1]
        for tap in tl.static_range(KERNEL - 1):
            y = tl.fma(taps[tap], values[index + tap], y)  # in the order of `convolved`
        y = _finished(y, added, factors[index], out.dtype.element_ty, BIAS, SILU, GATED)
        tl.store(out + (token + index) * channels + channel, y, mask=inside)


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
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    token = begin + tl.arange(0, TOKENS)[:, None]
    used = token < num_tokens
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.load(token_seqs + token, mask=used, other=0)
    first = tl.load(first_tokens + seq, mask=used, other=0).to(tl.int64)
    number = token - first
    if tl.min(tl.where(used, number, -1)) >= KERNEL - 1:
        _store_run(
            x,
            times,
            after,
            weight,
            bias,
            out,
            begin,
            tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
            x_stride,
            channels,
            KERNEL=KERNEL,
            SILU=SILU,
            BIAS=BIAS,
            GATED=GATED,
            TOKENS=TOKENS,
        )
    else:
        start = tl.load(starts + seq, mask=used, other=-1)
        row = tl.load(rows + seq, mask=used, other=0).to(tl.int64)
        for part in range(0, BLOCK, PART):
            channel = tl.program_id(1) * BLOCK + part + tl.arange(0, PART)[None, :]
            _store_results(
                x,
                times,
                after,
                weight,
                bias,
                state + row * state_stride,
                out,
                first,
                number,
                channel,
                used & (channel < channels),
                tl.where(start > 0, channels, 0),
                x_stride,
                channels,
                KERNEL=KERNEL,
                SILU=SILU,
                BIAS=BIAS,
                GATED=GATED,
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
        launch(
            _conv_tokens_kernel,
            tiles,
            *arguments,
            TOKENS=TILE_TOKENS,
            BLOCK=TILE_CHANNELS,
            PART=PART_CHANNELS,
            **options,
        )
    num_seqs = len(sequences.rows)
    step_channels = FEW_SEQS_CHANNELS if num_seqs <= FEW_SEQS else STEP_CHANNELS
    launch(
        _conv_steps_kernel,
        (num_seqs, cdiv(channels, step_channels)),
        *tensors,
        *ranges,
        sequences.num_new,
        *sizes,
        COMPUTES=few,
        TAPS=next_power_of_2(kernel_size - 1),
        BLOCK=step_channels,
        **options,
    )
    return out
