"""What decode attentions share: the way to a token's slot, its new heads, and parts of a softmax that are joined.

Where a (sequence, kv head) is cut, every program leaves its part in a workspace and the last to arrive joins them all.
"""

import torch
import triton
import triton.language as tl


class DecodeWorkspace:
    """Where partial results meet; one serves every layer and step, as each call leaves the counters at zero."""

    def __init__(
        self,
        *,
        max_batch: int,
        max_programs: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
    ) -> None:
        group = heads // kv_heads
        # A stream-K program leaves at most two parts: its first segment and its last.
        slots = 2 * max_programs
        self.acc = torch.empty(slots, group, head_dim, dtype=torch.float32, device=device)
        self.maxima = torch.empty(slots, group, dtype=torch.float32, device=device)
        self.sums = torch.empty(slots, group, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_batch * kv_heads, dtype=torch.int32, device=device)


@triton.jit
def block_numbers(table, tile_at, last_block, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The blocks that hold a tile's tokens: [TILE], or one number where a tile lies within a block."""
    if BLOCK_SIZE % TILE == 0:
        index = tile_at // BLOCK_SIZE
    elif TILE % BLOCK_SIZE == 0:
        index = tile_at // BLOCK_SIZE + tl.arange(0, TILE) // BLOCK_SIZE
    else:
        index = (tile_at + tl.arange(0, TILE)) // BLOCK_SIZE
    return tl.load(table + tl.minimum(index, last_block)).to(tl.int64)


@triton.jit
def slots_of(block, tile_at, head, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    """Which row of the cache ([blocks, kv_heads, block_size] flattened) holds each token of a tile."""
    token = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE == 0:
        inner = token % BLOCK_SIZE
    elif BLOCK_SIZE % TILE == 0:
        inner = tile_at % BLOCK_SIZE + token
    else:
        inner = (tile_at + token) % BLOCK_SIZE
    return block * (KV_HEADS * BLOCK_SIZE) + (head * BLOCK_SIZE + inner)


@triton.jit
def rotation(cos, sin, weight, col, partner, HEAD_DIM: tl.constexpr):
    """Factors of a column and of its partner in the other half: rotation times norm weight, [COLS] each."""
    if weight is not None:
        cos = cos * tl.load(weight + col, mask=col < HEAD_DIM, other=0.0).to(tl.float32)
        sin = sin * tl.load(weight + partner).to(tl.float32)
    return cos, sin


@triton.jit
def new_heads(
    qkv, seq, head, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DOT_ROWS: tl.constexpr
):
    """Loads a new token's queries, key (each also with its halves swapped) and value of one kv head."""
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


@triton.jit
def finish(
    acc,
    maximum,
    total_weight,
    part_acc,
    part_max,
    part_sum,
    counter,
    out,  # of this sequence and kv head
    slot,
    whole,
    first_part,
    last_part,
    first_in_second_slot,
    SLOTS_PER_PART: tl.constexpr,
    MERGED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DOT_ROWS: tl.constexpr,
):
    """Writes the result of a `whole` segment; leaves a part in its slot, and joins the parts if it is the last."""
    COLS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    col = tl.arange(0, COLS)
    member = tl.arange(0, DOT_ROWS)
    valid = (member < GROUP)[:, None] & (col < HEAD_DIM)[None, :]
    if whole:
        result = acc / total_weight[:, None]
        tl.store(out + member[:, None] * HEAD_DIM + col[None, :], result.to(out.dtype.element_ty), mask=valid)
    else:
        part = slot * GROUP + member
        tl.store(part_max + part, maximum, mask=member < GROUP)
        tl.store(part_sum + part, total_weight, mask=member < GROUP)
        tl.store(part_acc + part[:, None] * HEAD_DIM + col[None, :], acc, mask=valid)
        # The barrier orders every thread's part before the one thread that counts the arrival.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_part - first_part:
            tl.store(counter, 0)
            _merge(
                part_acc,
                part_max,
                part_sum,
                out,
                first_part,
                last_part,
                first_in_second_slot,
                SLOTS_PER_PART,
                MERGED,
                GROUP,
                HEAD_DIM,
            )


@triton.jit
def _merge(
    part_acc,
    part_max,
    part_sum,
    out,
    first_part,
    last_part,
    first_in_second_slot,
    SLOTS_PER_PART: tl.constexpr,
    MERGED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Joins the parts first..last that programs left of one (sequence, kv head), MERGED numbers at a time."""
    COLS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    GROUP_ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    PARTS: tl.constexpr = max(1, MERGED // (GROUP_ROWS * COLS))
    member = tl.arange(0, GROUP_ROWS)
    col = tl.arange(0, COLS)
    valid = (member < GROUP)[:, None] & (col < HEAD_DIM)[None, :]
    maximum = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    total_weight = tl.zeros((GROUP_ROWS,), tl.float32)
    acc = tl.zeros((GROUP_ROWS, COLS), tl.float32)
    for start in range(first_part, last_part + 1, PARTS):
        index = start + tl.arange(0, PARTS)
        slot = SLOTS_PER_PART * index + ((index == first_part) & first_in_second_slot).to(tl.int32)
        part = slot[:, None] * GROUP + member[None, :]  # [PARTS, GROUP_ROWS]
        there = (index <= last_part)[:, None] & (member < GROUP)[None, :]
        # Other processors wrote these: never from this one's own cache.
        maxima = tl.load(part_max + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(part_sum + part, mask=there, other=0.0, cache_modifier=".cg")
        accs = tl.load(
            part_acc + part[:, :, None] * HEAD_DIM + col[None, None, :],
            mask=there[:, :, None] & (col < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        new_maximum = tl.where(member < GROUP, new_maximum, 0.0)
        weights = tl.exp2(maxima - new_maximum[None, :])
        decay = tl.exp2(maximum - new_maximum)
        maximum = new_maximum
        total_weight = total_weight * decay + tl.sum(weights * sums, 0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * accs, 0)
    total_weight = tl.where(member < GROUP, total_weight, 1.0)
    result = acc / total_weight[:, None]
    tl.store(out + member[:, None] * HEAD_DIM + col[None, :], result.to(out.dtype.element_ty), mask=valid)
