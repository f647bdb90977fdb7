"""The workspace in which decode attention merges partial results (split-KV, as in flash decoding).

If several programs attend to one (sequence, KV head), each writes its partial softmax state (accumulator, maximum, sum)
to the workspace, and the last program to finish merges them. Where all programs run at the same time, they wait for
each other, and each merges some columns.
"""

import torch
import triton
import triton.language as tl


class DecodeWorkspace:
    """Partial softmax states and counters per (sequence, KV head).

    One workspace serves all layers and steps, because every call leaves the counters at zero.
    """

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
        # A stream-K program writes at most two partial results: of its first segment and of its last.
        slots = 2 * max_programs
        self.acc = torch.empty(slots, group, head_dim, dtype=torch.float32, device=device)
        self.maxima = torch.empty(slots, group, dtype=torch.float32, device=device)
        self.sums = torch.empty(slots, group, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_batch * kv_heads, dtype=torch.int32, device=device)
        self.waited = torch.zeros_like(self.arrived)


PART = tl.constexpr(64)  # columns of a head that a program of `finish_together` merges at a time
MOST_TOGETHER = tl.constexpr(32)  # partial results that it merges in one pass


@triton.jit
def finish(
    acc,
    maximum,
    total_weight,
    partial_acc,
    partial_max,
    partial_sum,
    counter,
    out,  # of this sequence and KV head
    slot,
    whole,
    first_partial,
    last_partial,
    first_in_second_slot,
    SLOTS_PER_PARTIAL: tl.constexpr,
    MERGED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Write the result of a segment.

    A `whole` segment covers its (sequence, KV head) alone and goes to `out`. Any other is a partial result and goes to
    its slot of the workspace; the last program to arrive merges partial results `first_partial` to `last_partial`.
    """
    if whole:
        _write(acc, total_weight, out, GROUP, HEAD_DIM)
    else:
        _write_partial(acc, maximum, total_weight, partial_acc, partial_max, partial_sum, slot, GROUP, HEAD_DIM)
        # The barrier orders all threads' stores before the one thread that increments the counter.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_partial - first_partial:
            tl.store(counter, 0)
            _merge(
                partial_acc,
                partial_max,
                partial_sum,
                out,
                first_partial,
                last_partial,
                first_in_second_slot,
                0,
                0,
                SLOTS_PER_PARTIAL,
                MERGED,
                GROUP,
                HEAD_DIM,
                triton.next_power_of_2(GROUP),
                triton.next_power_of_2(HEAD_DIM),
            )


@triton.jit
def finish_together(
    acc,
    maximum,
    total_weight,
    partial_acc,
    partial_max,
    partial_sum,
    arrived,
    waited,
    out,  # of this sequence and KV head
    first_partial,
    split,
    used_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Write the result of split `split` of `used_splits`, all of which run at the same time: wait for the others, then
    merge every `used_splits`-th part of the columns. Both counters are zero before and after."""
    PARTS: tl.constexpr = GROUP * (HEAD_DIM // PART)
    if used_splits == 1:
        _write(acc, total_weight, out, GROUP, HEAD_DIM)
    else:
        slot = first_partial + split
        _write_partial(acc, maximum, total_weight, partial_acc, partial_max, partial_sum, slot, GROUP, HEAD_DIM)
        tl.debug_barrier()  # orders all threads' stores before the one thread that increments the counter
        tl.atomic_add(arrived, 1, sem="release", scope="gpu")
        if split < PARTS:
            there = _acquire(arrived)
            while there < used_splits:
                there = _acquire(arrived)
            if tl.atomic_add(waited, 1, sem="acq_rel", scope="gpu") == tl.minimum(used_splits, PARTS) - 1:
                tl.store(waited, 0)  # nobody waits any more
                tl.store(arrived, 0)
            for part in range(split, PARTS, used_splits):
                member, first_col = part // (HEAD_DIM // PART), part % (HEAD_DIM // PART) * PART
                _merge(
                    partial_acc, partial_max, partial_sum, out, first_partial, first_partial + used_splits - 1, False,
                    member, first_col, 1, MOST_TOGETHER * PART, GROUP, HEAD_DIM, 1, PART,
                )  # fmt: skip


@triton.jit
def _acquire(pointer):
    ASM: tl.constexpr = "ld.acquire.gpu.global.s32 $0, [$1];"
    return tl.inline_asm_elementwise(ASM, "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _write(acc, total_weight, out, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    col, member = tl.arange(0, acc.shape[1]), tl.arange(0, acc.shape[0])
    valid = (member < GROUP)[:, None] & (col < HEAD_DIM)[None, :]
    result = acc / total_weight[:, None]
    tl.store(out + member[:, None] * HEAD_DIM + col[None, :], result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _write_partial(
    acc, maximum, total_weight, partial_acc, partial_max, partial_sum, slot, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr
):
    col, member = tl.arange(0, acc.shape[1]), tl.arange(0, acc.shape[0])
    valid = (member < GROUP)[:, None] & (col < HEAD_DIM)[None, :]
    partial = slot * GROUP + member
    tl.store(partial_max + partial, maximum, mask=member < GROUP)
    tl.store(partial_sum + partial, total_weight, mask=member < GROUP)
    tl.store(partial_acc + partial[:, None] * HEAD_DIM + col[None, :], acc, mask=valid)


@triton.jit
def _merge(
    partial_acc,
    partial_max,
    partial_sum,
    out,
    first_partial,
    last_partial,
    first_in_second_slot,
    first_member,
    first_col,
    SLOTS_PER_PARTIAL: tl.constexpr,
    MERGED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Merge GROUP_ROWS heads and COLS columns of the partial results of one (sequence, KV head), MERGED numbers at a
    time."""
    COUNT: tl.constexpr = max(1, MERGED // (GROUP_ROWS * COLS))
    member = first_member + tl.arange(0, GROUP_ROWS)
    col = first_col + tl.arange(0, COLS)
    valid = (member < GROUP)[:, None] & (col < HEAD_DIM)[None, :]
    maximum = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    total_weight = tl.zeros((GROUP_ROWS,), tl.float32)
    acc = tl.zeros((GROUP_ROWS, COLS), tl.float32)
    for start in range(first_partial, last_partial + 1, COUNT):
        index = start + tl.arange(0, COUNT)
        slot = SLOTS_PER_PARTIAL * index + ((index == first_partial) & first_in_second_slot).to(tl.int32)
        partial = slot[:, None] * GROUP + member[None, :]  # [COUNT, GROUP_ROWS]
        there = (index <= last_partial)[:, None] & (member < GROUP)[None, :]
        # Other SMs wrote these: bypass this SM's L1 cache.
        maxima = tl.load(partial_max + partial, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(partial_sum + partial, mask=there, other=0.0, cache_modifier=".cg")
        accs = tl.load(
            partial_acc + partial[:, :, None] * HEAD_DIM + col[None, None, :],
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
