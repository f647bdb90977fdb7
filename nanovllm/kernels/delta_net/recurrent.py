"""The gated delta net token by token: from the projected inputs of a layer to the input of its output projection.

The plain form is `layers/delta_net.py`. One program has a key head of one sequence with all value heads that belong to
it. For each of them it loads the state, [key_dim, value_dim], and for each new token computes the convolution, makes
query and key of length 1, decays and corrects the state, and norms and gates what the query reads from it. At the end
it stores the state and the newest inputs of the convolution. No other program reads or writes these.

Every token goes through the same instructions, whose order the compiler does not change, so its bits do not depend on
how a sequence was divided into steps or on other sequences.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.delta_net.conv_inputs import convolved, store_newest_inputs
from nanovllm.kernels.delta_net.gates import gated_norm, inverse_length, log_decay
from nanovllm.kernels.delta_net.sequences import OF_ANY_ALIGNMENT, NewTokens
from nanovllm.kernels.delta_net.weights import DeltaNetShape, DeltaNetWeights
from nanovllm.kernels.launch import launch, next_power_of_2


@triton.jit(do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _recurrent_kernel(
    x,
    gates,
    conv,
    dt_bias,
    A_log,
    norm,
    state,
    out,
    rows,
    starts,
    first_tokens,
    num_new,
    eps,
    x_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    PER_KEY: tl.constexpr = VALUE_HEADS // KEY_HEADS
    seq = tl.program_id(0)
    key_head = tl.program_id(1)
    key = tl.arange(0, KEY_PADDED)
    value = tl.arange(0, VALUE_PADDED)
    key_inside = key < KEY_DIM
    value_inside = value < VALUE_DIM
    inside = key_inside[:, None] & value_inside[None, :]
    norm_weight = tl.load(norm + value, mask=value_inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.load(first_tokens + seq).to(tl.int64)
    start = tl.load(starts + seq)
    num = tl.load(num_new + seq)
    before = state + tl.load(rows + seq).to(tl.int64) * state_stride
    kept_channels = tl.where(start > 0, CHANNELS, 0)
    kept = inside & (key < tl.where(start > 0, KEY_DIM, 0))[:, None]
    stored = inside & (key < tl.where(start >= 0, KEY_DIM, 0))[:, None]
    q_channel = key_head * KEY_DIM + key
    k_channel = KEYS + q_channel
    for part in range(PER_KEY):
        head = key_head * PER_KEY + part
        v_channel = 2 * KEYS + head * VALUE_DIM + value
        numbers = (KERNEL - 1) * CHANNELS + head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
        memory = tl.load(before + numbers, mask=kept, other=0.0)
        rate = tl.load(A_log + head).to(tl.float32)
        offset = tl.load(dt_bias + head).to(tl.float32)
        for number in range(num):
            q = convolved(
                x,
                x,
                before,
                conv,
                first,
                number,
                q_channel,
                key_inside,
                kept_channels,
                x_stride,
                CHANNELS,
                KERNEL,
                False,
            )
            k = convolved(
                x,
                x,
                before,
                conv,
                first,
                number,
                k_channel,
                key_inside,
                kept_channels,
                x_stride,
                CHANNELS,
                KERNEL,
                False,
            )
            v = convolved(
                x,
                x,
                before,
                conv,
                first,
                number,
                v_channel,
                value_inside,
                kept_channels,
                x_stride,
                CHANNELS,
                KERNEL,
                False,
            )
            q = q * tl.sigmoid(q)
            k = k * tl.sigmoid(k)
            v = v * tl.sigmoid(v)
            q = q * (inverse_length(q, AXIS=0) * KEY_DIM**-0.5)
            k = k * inverse_length(k, AXIS=0)
            token = first + number
            beta = tl.sigmoid(tl.load(gates + token * (2 * VALUE_HEADS) + head).to(tl.float32))
            a = tl.load(gates + token * (2 * VALUE_HEADS) + VALUE_HEADS + head).to(tl.float32)
            memory = memory * tl.exp(log_decay(a, offset, rate))
            known = tl.sum(memory * k[:, None], axis=0)
            memory = memory + k[:, None] * ((v - known) * beta)[None, :]
            read = tl.sum(memory * q[:, None], axis=0)
            gate = x + token * x_stride + CHANNELS + head * VALUE_DIM + value
            z = tl.load(gate, mask=value_inside, other=0.0).to(tl.float32)
            result = gated_norm(read, norm_weight, z, eps, VALUE_DIM, 0, out.dtype.element_ty)
            tl.store(out + token * VALUES + head * VALUE_DIM + value, result, mask=value_inside)
        tl.store(before + numbers, memory, mask=stored)
        store_newest_inputs(
            x, x, before, first, num, v_channel, value_inside, start, x_stride, CHANNELS, KERNEL, TAPS, False
        )
    store_newest_inputs(x, x, before, first, num, q_channel, key_inside, start, x_stride, CHANNELS, KERNEL, TAPS, False)
    store_newest_inputs(x, x, before, first, num, k_channel, key_inside, start, x_stride, CHANNELS, KERNEL, TAPS, False)


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
    launch(
        _recurrent_kernel,
        (num_seqs, shape.key_heads),
        x,
        gates,
        *weights,
        state,
        out,
        sequences.rows,
        sequences.starts,
        sequences.first_tokens,
        sequences.num_new,
        shape.eps,
        x.stride(0),
        state.stride(0),
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        KEY_PADDED=next_power_of_2(shape.key_dim),
        VALUE_PADDED=next_power_of_2(shape.value_dim),
        KERNEL=shape.kernel_size,
        TAPS=next_power_of_2(shape.kernel_size - 1),
        PDL=pdl,
        num_warps=8,
        enable_fp_fusion=False,
        pdl=pdl,
    )
