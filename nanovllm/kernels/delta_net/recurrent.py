"""The gated delta net token by token: from the projected inputs of a layer to the input of its output projection.

The plain form is `layers/delta_net.py`. In the first launch a program has a sequence, a value head and a tile of the
head's values, and keeps its part of the state, [key_dim, tile], in registers. For each new token it computes the
convolution, makes query and key of length 1, decays and corrects the state, and stores what the query reads from it.
All programs of a key head read the same inputs of the convolution, so these are replaced in the second launch, which
has a program for each sequence and value head and also norms and gates the results.

Every token goes through the same instructions, whose order the compiler does not change, so its bits do not depend on
how a sequence was divided into steps or on other sequences.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.delta_net.conv_inputs import convolved, store_newest_inputs
from nanovllm.kernels.delta_net.gates import gated_norm, inverse_length, log_decay
from nanovllm.kernels.delta_net.sequences import OF_ANY_ALIGNMENT, NewTokens
from nanovllm.kernels.delta_net.weights import DeltaNetShape, DeltaNetWeights
from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

TILE = 32  # values of a program
NORMED_TOKENS = 8  # that a program of the second launch has at a time


@triton.jit(do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _recurrent_kernel(
    x,
    gates,
    conv,
    dt_bias,
    A_log,
    state,
    out,
    rows,
    starts,
    first_tokens,
    num_new,
    x_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    SCALE: tl.constexpr,  # of queries
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    seq = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, KEY_PADDED)
    value = tl.program_id(2) * TILE + tl.arange(0, TILE)
    key_inside = key < KEY_DIM
    value_inside = value < VALUE_DIM
    rate = tl.load(A_log + head).to(tl.float32)
    offset = tl.load(dt_bias + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.load(first_tokens + seq).to(tl.int64)
    start = tl.load(starts + seq)
    num = tl.load(num_new + seq)
    before = state + tl.load(rows + seq).to(tl.int64) * state_stride
    kept_channels = tl.where(start > 0, CHANNELS, 0)
    kept = (key < tl.where(start > 0, KEY_DIM, 0))[:, None] & value_inside[None, :]
    stored = (key < tl.where(start >= 0, KEY_DIM, 0))[:, None] & value_inside[None, :]
    own = before + (KERNEL - 1) * CHANNELS + head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    memory = tl.load(own, mask=kept, other=0.0)  # [KEY_PADDED, TILE]
    q_channel = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    k_channel = KEYS + q_channel
    v_channel = 2 * KEYS + head * VALUE_DIM + value
    for number in range(num):
        q = convolved(
            x, x, before, conv, first, number, q_channel, key_inside, kept_channels, x_stride, CHANNELS, KERNEL, False
        )
        k = convolved(
            x, x, before, conv, first, number, k_channel, key_inside, kept_channels, x_stride, CHANNELS, KERNEL, False
        )
        v = convolved(
            x, x, before, conv, first, number, v_channel, value_inside, kept_channels, x_stride, CHANNELS, KERNEL, False
        )
        q = q * tl.sigmoid(q)
        k = k * tl.sigmoid(k)
        v = v * tl.sigmoid(v)
        q = q * (inverse_length(q, AXIS=0) * SCALE)
        k = k * inverse_length(k, AXIS=0)
        token = first + number
        beta = tl.sigmoid(tl.load(gates + token * (2 * VALUE_HEADS) + head).to(tl.float32))
        a = tl.load(gates + token * (2 * VALUE_HEADS) + VALUE_HEADS + head).to(tl.float32)
        memory = memory * tl.exp(log_decay(a, offset, rate))
        known = tl.sum(memory * k[:, None], axis=0)
        memory = memory + k[:, None] * ((v - known) * beta)[None, :]
        read = tl.sum(memory * q[:, None], axis=0)
        result = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + value
        tl.store(result, read.to(out.dtype.element_ty), mask=value_inside)
    tl.store(own, memory, mask=stored)


@triton.jit(do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _finish_recurrent_kernel(
    x,
    norm,
    state,
    out,
    rows,
    starts,
    first_tokens,
    num_new,
    x_stride,
    state_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    PER_KEY: tl.constexpr = VALUE_HEADS // KEY_HEADS
    seq = tl.program_id(0)
    head = tl.program_id(1)
    value = tl.arange(0, VALUE_PADDED)
    value_inside = value < VALUE_DIM
    weight = tl.load(norm + value, mask=value_inside, other=0.0).to(tl.float32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.load(first_tokens + seq).to(tl.int64)
    start = tl.load(starts + seq)
    num = tl.load(num_new + seq)
    before = state + tl.load(rows + seq).to(tl.int64) * state_stride
    for begin in range(0, num, TOKENS):
        number = begin + tl.arange(0, TOKENS)[:, None]
        inside = (number < num) & value_inside[None, :]
        own = out + (first + number) * VALUES + head * VALUE_DIM + value[None, :]
        read = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        gate = x + (first + number) * x_stride + CHANNELS + head * VALUE_DIM + value[None, :]
        z = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
        tl.store(own, gated_norm(read, weight, z, eps, VALUE_DIM, 1, out.dtype.element_ty), mask=inside)
    channel = 2 * KEYS + head * VALUE_DIM + value
    store_newest_inputs(x, x, before, first, num, channel, value_inside, start, x_stride, CHANNELS, KERNEL, TAPS, False)
    if head % PER_KEY == 0:  # one of a key head's programs has its channels
        key = tl.arange(0, KEY_PADDED)
        q_channel = head // PER_KEY * KEY_DIM + key
        k_channel = KEYS + q_channel
        known = key < KEY_DIM
        store_newest_inputs(x, x, before, first, num, q_channel, known, start, x_stride, CHANNELS, KERNEL, TAPS, False)
        store_newest_inputs(x, x, before, first, num, k_channel, known, start, x_stride, CHANNELS, KERNEL, TAPS, False)


def recurrent(
    x: Tensor,  # [num_tokens, channels + value_heads * value_dim]: inputs of the convolution, then the output gate
    gates: Tensor,  # [num_tokens, 2 * value_heads]: b, then a
    weights: DeltaNetWeights,
    state: Tensor,  # [rows, (kernel_size - 1) * channels + value_heads * key_dim * value_dim] float32, replaced
    sequences: NewTokens,
    shape: DeltaNetShape,
    *,
    out: Tensor,  # [num_tokens, value_heads * value_dim], written for the tokens of these sequences
    num_seqs: int,  # the first ones are computed
    pdl: bool = False,
) -> None:
    assert x.stride(1) == 1 and gates.is_contiguous() and out.is_contiguous() and state.stride(1) == 1
    ranges = sequences.rows, sequences.starts, sequences.first_tokens, sequences.num_new
    value_padded = next_power_of_2(shape.value_dim)
    tile = min(TILE, value_padded)
    options: dict[str, Any] = dict(
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        KERNEL=shape.kernel_size,
        KEY_PADDED=next_power_of_2(shape.key_dim),
        PDL=pdl,
        num_warps=4,
        enable_fp_fusion=False,
        pdl=pdl,
    )
    launch(
        _recurrent_kernel,
        (num_seqs, shape.value_heads, cdiv(shape.value_dim, tile)),
        x,
        gates,
        weights.conv,
        weights.dt_bias,
        weights.A_log,
        state,
        out,
        *ranges,
        x.stride(0),
        state.stride(0),
        SCALE=shape.key_dim**-0.5,
        TILE=tile,
        **options,
    )
    launch(
        _finish_recurrent_kernel,
        (num_seqs, shape.value_heads),
        x,
        weights.norm,
        state,
        out,
        *ranges,
        x.stride(0),
        state.stride(0),
        shape.eps,
        VALUE_PADDED=value_padded,
        TAPS=next_power_of_2(shape.kernel_size - 1),
        TOKENS=NORMED_TOKENS,
        **options,
    )
