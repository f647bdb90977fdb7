"""Routing and grouping in one launch for a few tokens: softmax over the router's logits, the best experts and their
weights as in route.py, and blocks of pairs of a token and an expert as in grouped.py.

One program has all logits: of few tokens, the two launches take longer than what they compute. Of more tokens several
programs choose, and the last one to finish makes the blocks. An expert's pairs keep their order, because the place of a
token among those of an expert is a sum over the tokens before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2
from nanovllm.kernels.moe.fp8_slots import Blocks

MOST_LOGITS = 16 * 128  # of all tokens: up to here one program is faster than two launches
MOST_LOGITS_OF_SEVERAL = 64 * 128  # with several programs; more were not measured
TOKENS_EACH = 8  # of these programs
NUM_WARPS = 8


def blocks_serve(num_tokens: int, num_experts: int, *, several: bool = False) -> bool:
    """`several`: whether several programs divide the tokens."""
    most = MOST_LOGITS_OF_SEVERAL if several else MOST_LOGITS
    return next_power_of_2(num_tokens) * next_power_of_2(num_experts) <= most


@triton.jit
def _ordered(bits):
    """Integers in the order of the 16-bit floats with these bits, sign-extended; and the way back."""
    return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def _logits_of(keys, pointer):
    """In float32; of keys of what is no number, a very small one."""
    bits = _ordered(keys >> 16).to(tl.int16).to(pointer.dtype.element_ty, bitcast=True)
    return tl.where(keys == -(2**31), -3e38, tl.maximum(bits.to(tl.float32), -3e38))


@triton.jit
def _choose(
    logits_ptr, weights_ptr, token, num_tokens, SPLITS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Write the weights of tokens, [T, 1]. For each expert which choice of the token it is, TOP_K if none."""
    expert, choice = tl.arange(0, EXPERTS)[None, :], tl.arange(0, CHOICES)
    inside = (token < num_tokens) & (expert < NUM_EXPERTS)
    pointers = logits_ptr + token * NUM_EXPERTS + expert
    loaded = tl.load(pointers, mask=inside, other=float("-inf"))
    for split in tl.static_range(1, SPLITS):
        loaded += tl.load(pointers + split * num_tokens * NUM_EXPERTS, mask=inside, other=0.0)
    loaded = loaded.to(weights_ptr.dtype.element_ty)
    logits = loaded.to(tl.float32)
    bits = tl.where(logits == 0, 0, loaded.to(tl.int16, bitcast=True).to(tl.int32))  # the zeros are equal
    # a logit and its expert, the lower the better, as one number; what is no number is last
    keys = tl.where(logits == logits, _ordered(bits) * 65536 + (65535 - expert), -(2**31))
    highest = _logits_of(tl.max(keys, 1), weights_ptr)
    total = tl.sum(tl.where(inside & (logits == logits), tl.exp(logits - highest[:, None]), 0.0), 1)
    weights = tl.zeros([token.shape[0], CHOICES], tl.float32)
    numbers = tl.full([token.shape[0], EXPERTS], TOP_K, tl.int32)
    for number in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        weight = tl.exp(_logits_of(best, weights_ptr) - highest) / tl.maximum(total, 1e-30)
        weights = tl.where(choice[None, :] == number, weight[:, None], weights)
        found = (keys == best[:, None]) & (keys > -(2**31)) & inside
        numbers = tl.where(found, number, numbers)
        keys = tl.where(found, -(2**31), keys)
    if NORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 1), 1e-30)[:, None]
    of_weights = (token < num_tokens) & (choice < TOP_K)[None, :]
    tl.store(weights_ptr + token * TOP_K + choice[None, :], weights.to(weights_ptr.dtype.element_ty), mask=of_weights)
    return numbers


@triton.jit
def _write_blocks(
    counts, num_pairs, num_blocks, block_experts_ptr, pairs_ptr,
    MOST: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the experts of the blocks and what fills them up, for experts with `counts` pairs. Each one's first
    block."""
    EXPERTS: tl.constexpr = counts.shape[0]
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.cumsum(blocks, 0) - blocks
    i = tl.arange(0, BLOCK_M)[:, None]
    padding = first_block[None, :] * BLOCK_M + counts[None, :] + i
    free = (blocks * BLOCK_M - counts)[None, :]
    tl.store(pairs_ptr + padding, tl.zeros([BLOCK_M, EXPERTS], tl.int32) + num_pairs, mask=i < free)
    i = tl.arange(0, MOST)[:, None]
    own = tl.zeros([MOST, EXPERTS], tl.int32) + tl.arange(0, EXPERTS)[None, :]
    tl.store(block_experts_ptr + first_block[None, :] + i, own, mask=i < blocks[None, :])
    block = tl.arange(0, BLOCKS)
    unused = (block >= tl.sum(blocks, 0)) & (block < num_blocks)
    tl.store(block_experts_ptr + block, tl.full([BLOCKS], -1, tl.int32), mask=unused)
    return first_block


@triton.jit
def _num_bits(x):
    """How many of the lowest eight bits are set, elementwise (a population count)."""
    x = x - ((x >> 1) & 0x55)
    x = (x & 0x33) + ((x >> 2) & 0x33)
    return (x + (x >> 4)) & 0x0F


@triton.jit
def _write_pairs(
    tokens_of_experts, experts_ptr, num_pairs, num_blocks, block_experts_ptr, pairs_ptr, NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, MOST: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the blocks, from each expert's tokens, a bit for each of eight, [TOKENS / 8, EXPERTS], and each token's
    experts."""
    PAIRS: tl.constexpr = triton.next_power_of_2(TOKENS * TOP_K)
    eight, expert = tl.arange(0, TOKENS // 8), tl.arange(0, EXPERTS)
    pair = tl.arange(0, PAIRS)
    token = pair // TOP_K
    # other multiprocessors wrote these: bypass this one's L1 cache
    chosen = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1, cache_modifier=".cg")
    inside, at = eight[:, None] * 8 * TOP_K < num_pairs, tokens_of_experts + eight[:, None] * EXPERTS + expert
    all_bits = tl.load(at, mask=inside, other=0, cache_modifier=".cg")
    there = (chosen >= 0) & (chosen < NUM_EXPERTS)
    chosen = tl.where(there, chosen, 0)
    at = tokens_of_experts + eight[None, :] * EXPERTS + chosen[:, None]
    bits = tl.load(at, mask=there[:, None] & (eight[None, :] <= (token // 8)[:, None]), other=0, cache_modifier=".cg")
    before = tl.where(eight[None, :] == (token // 8)[:, None], ((1 << token % 8) - 1)[:, None], 255)
    ordinal = tl.sum(_num_bits(bits & before), 1)
    counts = tl.sum(_num_bits(all_bits), 0)
    first_block = _write_blocks(counts, num_pairs, num_blocks, block_experts_ptr, pairs_ptr, MOST, BLOCKS, BLOCK_M)
    slot = tl.gather(first_block, chosen, 0) * BLOCK_M + ordinal
    # of what is no number, nothing is chosen
    there &= tl.sum(tl.where(eight[None, :] == (token // 8)[:, None], bits >> (token % 8)[:, None], 0), 1) % 2 == 1
    tl.store(pairs_ptr + slot, pair, mask=there)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _route_blocks_kernel(
    logits_ptr,  # [SPLITS, T, NUM_EXPERTS], added up and rounded to the type of the weights
    weights_ptr,  # [T, TOP_K], written
    block_experts_ptr,  # [num_blocks], written: -1 for unused blocks
    pairs_ptr,  # [num_blocks * BLOCK_M], written: those past the last of an expert are T * TOP_K
    experts_ptr,  # for several programs: [T, TOP_K], what each token chose, and
    tokens_of_experts,  # [programs, EXPERTS], a bit for each of a program's tokens
    arrived_ptr,  # [1], zero before and after
    num_tokens,
    num_blocks,
    SPLITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # num_tokens, NUM_EXPERTS, TOP_K and the blocks of an expert, padded to powers of two
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    MOST: tl.constexpr,
    BLOCKS: tl.constexpr,  # num_blocks
    BLOCK_M: tl.constexpr,
    EACH: tl.constexpr,  # tokens per program
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.arange(0, EXPERTS)[None, :]
    own = tl.program_id(0) * EACH + tl.arange(0, EACH)[:, None]
    numbers = _choose(logits_ptr, weights_ptr, own, num_tokens, SPLITS, NUM_EXPERTS, TOP_K, NORMALIZE, EXPERTS, CHOICES)
    chosen = (numbers < TOP_K).to(tl.int32)
    if experts_ptr is None:
        counts = tl.sum(chosen, 0)
        first_block = _write_blocks(
            counts, num_tokens * TOP_K, num_blocks, block_experts_ptr, pairs_ptr, MOST, BLOCKS, BLOCK_M
        )
        slot = first_block[None, :] * BLOCK_M + tl.cumsum(chosen, 0) - chosen
        tl.store(pairs_ptr + slot, own * TOP_K + numbers, mask=chosen > 0)
    else:
        tl.static_assert(EACH == 8)
        bits = tl.sum(chosen << tl.arange(0, EACH)[:, None], 0)
        tl.store(tokens_of_experts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), bits)
        tl.store(experts_ptr + own * TOP_K + numbers, tl.zeros([EACH, EXPERTS], tl.int32) + expert, mask=chosen > 0)
        tl.debug_barrier()  # orders all threads' stores before the one thread that increments the counter
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            tl.store(arrived_ptr, 0)
            _write_pairs(
                tokens_of_experts, experts_ptr, num_tokens * TOP_K, num_blocks, block_experts_ptr, pairs_ptr,
                NUM_EXPERTS, TOP_K, TOKENS, EXPERTS, MOST, BLOCKS, BLOCK_M,
            )  # fmt: skip


def route_blocks(
    logits: Tensor,  # [T, experts], of 16 bits, or [splits, T, experts] float32: partial sums
    top_k: int,
    *,
    normalize: bool,
    block_m: int,
    dtype: torch.dtype | None = None,  # to which partial sums are rounded
    arrived: Tensor | None = None,  # [1] int32, zero before and after: for more tokens, several programs
    pdl: bool = False,
) -> tuple[Tensor, Blocks]:
    """Weights, [T, top_k], and the blocks of the chosen experts."""
    (num_tokens, num_experts), device, dtype = logits.shape[-2:], logits.device, dtype or logits.dtype
    assert logits.is_contiguous() and dtype.itemsize == 2 and top_k <= num_experts
    assert blocks_serve(num_tokens, num_experts, several=arrived is not None)
    num_pairs = num_tokens * top_k
    num_blocks = min(num_pairs, num_experts) + num_pairs // block_m
    weights = torch.empty(num_tokens, top_k, dtype=dtype, device=device)
    pairs = torch.empty(num_blocks * block_m, dtype=torch.int32, device=device)
    block_experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    tokens, experts = next_power_of_2(num_tokens), next_power_of_2(num_experts)
    each = tokens if arrived is None else TOKENS_EACH
    tokens, programs = max(tokens, each), cdiv(num_tokens, each)
    launch(
        _route_blocks_kernel,
        (programs,),
        logits,
        weights,
        block_experts,
        pairs,
        None if arrived is None else torch.empty(num_pairs, dtype=torch.int32, device=device),
        None if arrived is None else torch.empty(programs, experts, dtype=torch.int32, device=device),
        arrived,
        num_tokens,
        num_blocks,
        SPLITS=1 if logits.dim() == 2 else len(logits),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALIZE=normalize,
        TOKENS=tokens,
        EXPERTS=experts,
        CHOICES=next_power_of_2(top_k),
        MOST=next_power_of_2(cdiv(tokens, block_m)),
        BLOCKS=next_power_of_2(min(tokens * top_k, num_experts) + tokens * top_k // block_m),
        BLOCK_M=block_m,
        EACH=each,
        PDL=pdl,
        num_warps=min(16, max(4, tokens * experts // 128)) if arrived is None else NUM_WARPS,
        pdl=pdl,
    )
    return weights, Blocks(block_experts, pairs)
