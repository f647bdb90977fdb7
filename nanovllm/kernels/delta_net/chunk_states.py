"""Second kernel of a prompt's gated delta net: passes the state from chunk to chunk and computes the outputs.

One program has a sequence, a value head and a tile of the head's values, and keeps its part of the state, [key_dim,
tile], in registers. With what `chunk_factors.py` computed, a chunk is five products of matrices. The plain form is
`chunks` in `layers/delta_rule.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.delta_net.chunk_factors import DOT_TYPES, SHORTEST_DOT, ChunkFactors
from nanovllm.kernels.delta_net.sequences import CHUNK, OF_ANY_ALIGNMENT, NewTokens
from nanovllm.kernels.delta_net.weights import DeltaNetShape
from nanovllm.kernels.launch import cdiv, launch, next_power_of_2
from nanovllm.kernels.linear.tiled import _device_limits

TILE = 64  # values of a program
SMALL_TILE = 32  # where every program then has an SM of its own
LOADED_AHEAD = 190_000  # bytes of shared memory for two chunks besides the one that is computed


@triton.jit(do_not_specialize=["first_seq"], do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _chunk_states_kernel(
    x,
    state,
    solved,
    within,
    factors,
    out,
    rows,
    starts,
    first_tokens,
    num_new,
    first_chunks,
    first_seq,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    KEPT: tl.constexpr,  # numbers of a state before its matrices
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    seq = first_seq + tl.program_id(0)
    head = tl.program_id(1)
    token = tl.arange(0, CHUNK)
    key = tl.arange(0, KEY_PADDED)
    value = tl.program_id(2) * TILE + tl.arange(0, TILE)
    key_inside = key < KEY_DIM
    value_inside = value < VALUE_DIM
    square = token[:, None] * CHUNK + token[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.load(first_tokens + seq).to(tl.int64)
    start = tl.load(starts + seq)
    num = tl.load(num_new + seq)
    item = tl.load(first_chunks + seq).to(tl.int64) * VALUE_HEADS + head
    row = tl.load(rows + seq).to(tl.int64)
    own = state + row * state_stride + KEPT + head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    kept = (key < tl.where(start > 0, KEY_DIM, 0))[:, None] & value_inside[None, :]
    memory = tl.load(own, mask=kept, other=0.0)  # [KEY_PADDED, TILE]
    q_channel = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    v_channel = 2 * KEYS + head * VALUE_DIM + value
    for begin in range(0, num, CHUNK):
        used = (begin + token < num)[:, None]
        at = x + (first + begin + token)[:, None] * CHANNELS
        q = tl.load(at + q_channel[None, :], mask=used & key_inside[None, :], other=0.0).to(DOT_TYPE)
        k = tl.load(at + KEYS + q_channel[None, :], mask=used & key_inside[None, :], other=0.0).to(DOT_TYPE)
        v = tl.load(at + v_channel[None, :], mask=used & value_inside[None, :], other=0.0).to(tl.float32)
        inverse = tl.load(solved + item * (CHUNK * CHUNK) + square).to(DOT_TYPE)
        scores = tl.load(within + item * (CHUNK * CHUNK) + square).to(DOT_TYPE)
        scale = factors + item * (4 * CHUNK) + token
        known_scale = tl.load(scale)[:, None]
        read_scale = tl.load(scale + CHUNK)[:, None]
        end_scale = tl.load(scale + 2 * CHUNK)[:, None]
        whole = tl.load(factors + item * (4 * CHUNK) + 3 * CHUNK)

        before = memory.to(DOT_TYPE)
        known = tl.dot(k, before, input_precision=PRECISION) * known_scale
        new = tl.dot(inverse, (v - known).to(DOT_TYPE), input_precision=PRECISION)
        read = tl.dot(q, before, input_precision=PRECISION) * read_scale
        read = tl.dot(scores, new.to(DOT_TYPE), read, input_precision=PRECISION)
        memory = tl.dot(tl.trans(k), (new * end_scale).to(DOT_TYPE), memory * whole, input_precision=PRECISION)
        result = out + (first + begin + token)[:, None] * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + value[None, :]
        tl.store(result, read.to(out.dtype.element_ty), mask=used & value_inside[None, :])
        item += VALUE_HEADS
    tl.store(own, memory, mask=(key < tl.where(start >= 0, KEY_DIM, 0))[:, None] & value_inside[None, :])


def chunk_states(
    x: Tensor,  # [num_tokens, channels]: queries, keys and values after the convolution
    found: ChunkFactors,
    first_chunks: Tensor,  # [num_seqs] number of each sequence's first chunk
    state: Tensor,  # [rows, (kernel_size - 1) * channels + value_heads * key_dim * value_dim] float32, replaced
    sequences: NewTokens,
    shape: DeltaNetShape,
    *,
    out: Tensor,  # [num_tokens, value_heads * value_dim], written for the tokens of these sequences
    skip: int,  # the first sequences, which have no chunks
    pdl: bool = False,
) -> None:
    assert x.is_contiguous() and out.is_contiguous() and state.stride(1) == 1
    num_sms, shared_bytes = _device_limits()
    num_seqs = len(sequences.rows) - skip
    few = num_seqs * shape.value_heads * cdiv(shape.value_dim, SMALL_TILE) <= num_sms
    tile = min(SMALL_TILE if few else TILE, max(SHORTEST_DOT, next_power_of_2(shape.value_dim)))
    launch(
        _chunk_states_kernel,
        (num_seqs, shape.value_heads, cdiv(shape.value_dim, tile)),
        x,
        state,
        found.solved,
        found.within,
        found.factors,
        out,
        sequences.rows,
        sequences.starts,
        sequences.first_tokens,
        sequences.num_new,
        first_chunks,
        skip,
        state.stride(0),
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        CHANNELS=shape.channels,
        KEY_PADDED=max(SHORTEST_DOT, next_power_of_2(shape.key_dim)),
        KEPT=(shape.kernel_size - 1) * shape.channels,
        TILE=tile,
        CHUNK=CHUNK,
        DOT_TYPE=DOT_TYPES[x.dtype],
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=4,
        num_stages=3 if x.dtype != torch.float32 and shared_bytes >= LOADED_AHEAD else 1,
        pdl=pdl,
    )
