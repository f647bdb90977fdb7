"""Load a new token's queries, key and value, the factors that norm and rotate them, and the sinks of its heads."""

import triton
import triton.language as tl


@triton.jit
def rotation(cos, sin, weight, col, partner, HEAD_DIM: tl.constexpr):
    """Factors for a column and for its partner in the other half: rotation times norm weight, [COLS] each."""
    if weight is not None:
        cos = cos * tl.load(weight + col, mask=col < HEAD_DIM, other=0.0).to(tl.float32)
        sin = sin * tl.load(weight + partner).to(tl.float32)
    return cos, sin


@triton.jit
def sink_scores(sinks, head, newest, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sinks of a KV head's queries as scores, times log2(e) for exp2; -inf = none, where not `newest`."""
    member = tl.arange(0, ROWS)
    scores = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=float("-inf")).to(tl.float32)
    return tl.where(newest, scores * 1.4426950408889634, float("-inf"))


@triton.jit
def new_heads(
    qkv, seq, head, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DOT_ROWS: tl.constexpr
):
    """Load a new token's queries, key and value of one KV head; queries and key also with their halves swapped."""
    COLS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    HEADS: tl.constexpr = GROUP * KV_HEADS
    col = tl.arange(0, COLS)
    partner = (col + HEAD_DIM // 2) % HEAD_DIM
    member = tl.arange(0, DOT_ROWS)
    token_row = qkv + seq.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q_rows = token_row + (head * GROUP + member)[:, None] * HEAD_DIM
    is_query = (member < GROUP)[:, None] & (col < HEAD_DIM)[None, :]
    q = tl.load(q_rows + col[None, :], mask=is_query, other=0.0)
    q_swapped = tl.load(q_rows + partner[None, :], mask=is_query, other=0.0)
    k_row = token_row + (HEADS + head) * HEAD_DIM
    k = tl.load(k_row + col, mask=col < HEAD_DIM, other=0.0)
    k_swapped = tl.load(k_row + partner, mask=col < HEAD_DIM, other=0.0)
    v = tl.load(k_row + KV_HEADS * HEAD_DIM + col, mask=col < HEAD_DIM, other=0.0)
    return q, q_swapped, k, k_swapped, v
