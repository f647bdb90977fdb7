"""First kernel of a prompt's gated delta net: what CHUNK tokens of a head need from each other, all chunks at once.

With S the state at the start of a chunk, d(t) the product of its decays up to token t, and all k and q of length 1, the
corrections n(t) that the tokens add to the state (`layers/delta_rule.py`) are the solution of

    n(t) + beta(t) * sum over s < t of d(t) / d(s) * (k(t) . k(s)) * n(s) = beta(t) * (v(t) - d(t) * S^T k(t))

One program computes, for one chunk of a value head, the inverse of this triangular system with columns multiplied by
beta (`solved`), the scores of the outputs (`within`), and for each token four factors (`factors`):
    0: d(t) / |k(t)|, 1: d(t) / |q(t)| with the scale of queries, 2: d(end) / d(t) / |k(t)|, 3: d(end)
`chunk_states.py` then passes the state from chunk to chunk.

The inverse of a block on the diagonal follows from those of its two halves by two products of matrices. So the inverses
of blocks of 2, 4, 8 and 16 rows are computed for all blocks side by side, then those of 32 rows and of the whole chunk.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.delta_net.gates import inverse_length, log_decay
from nanovllm.kernels.delta_net.sequences import CHUNK, OF_ANY_ALIGNMENT, NewTokens
from nanovllm.kernels.delta_net.weights import DeltaNetShape, DeltaNetWeights
from nanovllm.kernels.launch import launch, next_power_of_2

SHORTEST_DOT = 16  # dimension of a product of matrices
DOT_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class ChunkFactors:
    solved: Tensor  # [num_chunks, value_heads, CHUNK, CHUNK]
    within: Tensor  # [num_chunks, value_heads, CHUNK, CHUNK]
    factors: Tensor  # [num_chunks, value_heads, 4, CHUNK] float32


@triton.jit
def _joined(inverse, system, row, column, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of a triangular matrix's diagonal blocks of 2 * SIZE rows, from those of its blocks of SIZE rows."""
    # With A and B on the diagonal and C below A: [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]
    below = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE > column // SIZE)
    below = tl.where(below, system, 0.0)
    left = tl.dot(inverse, below, input_precision=PRECISION)
    return inverse - tl.dot(left, inverse, input_precision=PRECISION)


@triton.jit
def _inverse(system, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)^-1, where `system`, [CHUNK, CHUNK], is zero on the diagonal and above."""
    BLOCK: tl.constexpr = 16  # of the blocks that are inverted side by side
    COUNT: tl.constexpr = CHUNK // BLOCK
    same = tl.arange(0, COUNT)[:, None, None, None] == tl.arange(0, COUNT)[None, None, :, None]
    blocks = tl.reshape(system, (COUNT, BLOCK, COUNT, BLOCK))
    blocks = tl.sum(tl.where(same, blocks, 0.0), axis=2)  # [COUNT, BLOCK, BLOCK]
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -blocks, 0.0))
    inverse = _joined(inverse, blocks, row, column, 2, PRECISION)
    inverse = _joined(inverse, blocks, row, column, 4, PRECISION)
    inverse = _joined(inverse, blocks, row, column, 8, PRECISION)
    inverse = tl.where(same, inverse[:, :, None, :], 0.0)
    inverse = tl.reshape(inverse, (CHUNK, CHUNK))
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = _joined(inverse, system, row, column, 16, PRECISION)
    return _joined(inverse, system, row, column, 32, PRECISION)


@triton.jit(do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _chunk_factors_kernel(
    x,
    gates,
    dt_bias,
    A_log,
    solved,
    within,
    factors,
    chunks,
    first_tokens,
    num_new,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    SCALE: tl.constexpr,  # of queries
    CHUNK: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    chunk = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.load(chunks + 2 * chunk)
    begin = tl.load(chunks + 2 * chunk + 1) * CHUNK
    first = tl.load(first_tokens + seq).to(tl.int64) + begin
    token = tl.arange(0, CHUNK)
    used = token < tl.load(num_new + seq) - begin
    key = tl.arange(0, KEY_PADDED)
    inside = used[:, None] & (key < KEY_DIM)[None, :]
    at = (first + token)[:, None] * CHANNELS + key_head * KEY_DIM + key[None, :]
    q = tl.load(x + at, mask=inside, other=0.0)
    k = tl.load(x + at + KEY_HEADS * KEY_DIM, mask=inside, other=0.0)
    q_scale = inverse_length(q.to(tl.float32), AXIS=1) * SCALE
    k_scale = inverse_length(k.to(tl.float32), AXIS=1)
    row, column = token[:, None], token[None, :]
    scores = tl.dot(q.to(DOT_TYPE), tl.trans(k.to(DOT_TYPE)), input_precision=PRECISION)
    scores = tl.where(row >= column, scores * (q_scale[:, None] * k_scale[None, :]), 0.0)
    products = tl.dot(k.to(DOT_TYPE), tl.trans(k.to(DOT_TYPE)), input_precision=PRECISION)
    products = tl.where(row > column, products * (k_scale[:, None] * k_scale[None, :]), 0.0)
    rate = tl.load(A_log + head).to(tl.float32)
    offset = tl.load(dt_bias + head).to(tl.float32)
    gate = gates + (first + token) * (2 * VALUE_HEADS) + head
    beta = tl.where(used, tl.sigmoid(tl.load(gate, mask=used, other=0.0).to(tl.float32)), 0.0)
    a = tl.load(gate + VALUE_HEADS, mask=used, other=0.0).to(tl.float32)
    decay = tl.where(used, log_decay(a, offset, rate), 0.0)
    since = tl.cumsum(decay, axis=0)
    total = tl.sum(decay, axis=0)
    item = chunk.to(tl.int64) * VALUE_HEADS + head
    own = factors + item * (4 * CHUNK) + token
    tl.store(own, tl.exp(since) * k_scale)
    tl.store(own + CHUNK, tl.exp(since) * q_scale)
    tl.store(own + 2 * CHUNK, tl.exp(total - since) * k_scale)
    tl.store(own + 3 * CHUNK, tl.exp(total + tl.zeros([CHUNK], tl.float32)))

    between = tl.exp(tl.where(row >= column, since[:, None] - since[None, :], 0.0))
    square = item * (CHUNK * CHUNK) + row * CHUNK + column
    tl.store(within + square, (scores * between).to(within.dtype.element_ty))
    inverse = _inverse(products * between * beta[:, None], CHUNK=CHUNK, PRECISION=PRECISION)
    tl.store(solved + square, (inverse * beta[None, :]).to(solved.dtype.element_ty))


def chunk_factors(
    x: Tensor,  # [num_tokens, channels]: queries, keys and values after the convolution
    gates: Tensor,  # [num_tokens, 2 * value_heads]: b, then a
    weights: DeltaNetWeights,
    chunks: Tensor,  # [num_chunks, 2] sequence, and number of the chunk in it
    sequences: NewTokens,
    shape: DeltaNetShape,
    *,
    pdl: bool = False,
) -> ChunkFactors:
    assert x.is_contiguous() and gates.is_contiguous() and chunks.is_contiguous()
    heads = len(chunks), shape.value_heads
    found = ChunkFactors(
        solved=x.new_empty((*heads, CHUNK, CHUNK)),
        within=x.new_empty((*heads, CHUNK, CHUNK)),
        factors=x.new_empty((*heads, 4, CHUNK), dtype=torch.float32),
    )
    launch(
        _chunk_factors_kernel,
        (shape.value_heads, len(chunks)),
        x,
        gates,
        weights.dt_bias,
        weights.A_log,
        found.solved,
        found.within,
        found.factors,
        chunks,
        sequences.first_tokens,
        sequences.num_new,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        CHANNELS=shape.channels,
        KEY_PADDED=max(SHORTEST_DOT, next_power_of_2(shape.key_dim)),
        SCALE=shape.key_dim**-0.5,
        CHUNK=CHUNK,
        DOT_TYPE=DOT_TYPES[x.dtype],
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=4,
        num_stages=1,
        maxnreg=None if x.dtype == torch.float32 else 128,  # four programs share an SM
        pdl=pdl,
    )
    return found
