"""The gated delta rule token by token, after the convolution and before the norm of each head.

The plain form is `step` in `layers/delta_rule.py`. A program has a sequence, a value head and a tile of the head's
values, and keeps its part of the state, [key_dim, tile], in registers. Nearly all its time goes into reading and
writing the state: it asks for the state before it waits for the convolution, since no other kernel of the step writes
this layer's matrices; it is a single warp, so that sums over keys need no barrier; and programs that start together
have neighbouring tiles, which are neighbours in memory.

With S the state before a token, d its decay, and n = beta (v - d S^T k), the new state is d S + k n^T and the result
d S^T q + (q . k) n. Both sums over the old state are added up side by side.

Every token goes through the same instructions, whose order the compiler does not change, so its bits do not depend on
how a sequence was divided into steps or on other sequences.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.delta_net.gates import inverse_length, log_decay
from nanovllm.kernels.delta_net.sequences import OF_ANY_ALIGNMENT, NewTokens
from nanovllm.kernels.delta_net.weights import DeltaNetShape, DeltaNetWeights
from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

TILE = 32  # values of a program: 128 registers of each thread hold the state of 128 keys


@triton.jit(do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _recurrent_kernel(
    x,
    gates,
    dt_bias,
    A_log,
    state,
    out,
    rows,
    starts,
    first_tokens,
    num_new,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    KEPT: tl.constexpr,  # numbers of a state before its matrices
    SCALE: tl.constexpr,  # of queries
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    TILES: tl.constexpr = (VALUE_DIM + TILE - 1) // TILE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) // TILES
    seq = tl.program_id(1)
    key = tl.arange(0, KEY_PADDED)
    value = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    key_inside = key < KEY_DIM
    value_inside = value < VALUE_DIM
    inside = key_inside[:, None] & value_inside[None, :]
    row = tl.load(rows + seq).to(tl.int64)
    own = state + row * state_stride + KEPT + head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    memory = tl.load(own, mask=inside, other=0.0)  # [KEY_PADDED, TILE]
    first = tl.load(first_tokens + seq).to(tl.int64)
    num = tl.load(num_new + seq)
    rate = tl.load(A_log + head).to(tl.float32)
    offset = tl.load(dt_bias + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    start = tl.load(starts + seq)  # an early kernel of a decode step writes it
    memory = tl.where(start > 0, memory, 0.0)
    q_channel = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    v_channel = 2 * KEYS + head * VALUE_DIM + value
    for number in range(num):
        token = first + number
        inputs = x + token * CHANNELS
        q = tl.load(inputs + q_channel, mask=key_inside, other=0.0).to(tl.float32)
        k = tl.load(inputs + KEYS + q_channel, mask=key_inside, other=0.0).to(tl.float32)
        v = tl.load(inputs + v_channel, mask=value_inside, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(gates + token * (2 * VALUE_HEADS) + head).to(tl.float32))
        a = tl.load(gates + token * (2 * VALUE_HEADS) + VALUE_HEADS + head).to(tl.float32)
        decay = tl.exp(log_decay(a, offset, rate))
        q = q * (inverse_length(q, AXIS=0) * SCALE)
        k = k * inverse_length(k, AXIS=0)
        known = tl.sum(memory * k[:, None], axis=0)
        read = tl.sum(memory * q[:, None], axis=0)
        new = (v - known * decay) * beta
        read = tl.fma(new, tl.sum(q * k, axis=0), read * decay)
        memory = tl.fma(k[:, None], new[None, :], memory * decay)
        result = out + (token * VALUE_HEADS + head) * VALUE_DIM + value
        tl.store(result, read.to(out.dtype.element_ty), mask=value_inside)
    if start >= 0:
        tl.store(own, memory, mask=inside)


def recurrent(
    x: Tensor,  # [num_tokens, channels]: queries, keys and values after the convolution
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
    assert x.is_contiguous() and gates.is_contiguous() and out.is_contiguous() and state.stride(1) == 1
    tile = min(TILE, next_power_of_2(shape.value_dim))
    launch(
        _recurrent_kernel,
        (shape.value_heads * cdiv(shape.value_dim, tile), num_seqs),
        x,
        gates,
        weights.dt_bias,
        weights.A_log,
        state,
        out,
        sequences.rows,
        sequences.starts,
        sequences.first_tokens,
        sequences.num_new,
        state.stride(0),
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        CHANNELS=shape.channels,
        KEY_PADDED=next_power_of_2(shape.key_dim),
        KEPT=(shape.kernel_size - 1) * shape.channels,
        SCALE=shape.key_dim**-0.5,
        TILE=tile,
        PDL=pdl,
        num_warps=1,
        enable_fp_fusion=False,
        pdl=pdl,
    )
