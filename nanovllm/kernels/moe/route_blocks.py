"""Routing and grouping in one launch for a few tokens: softmax over the router's logits, the best experts and their
weights as in route.py, and blocks of pairs of a token and an expert as in grouped.py.

One program has all logits: of few tokens, the two launches take longer than what they compute. An expert's pairs keep
their order, because the place of a token among those of an expert is a sum over the tokens before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2
from nanovllm.kernels.moe.fp8_slots import Blocks

MOST_LOGITS = 16 * 128  # of all tokens: up to here one program is faster than two launches


def blocks_serve(num_tokens: int, num_experts: int) -> bool:
    return next_power_of_2(num_tokens) * next_power_of_2(num_experts) <= MOST_LOGITS


@triton.jit
def _ordered(bits):
    """Integers in the order of the 16-bit floats with these bits, sign-extended; and the way back."""
    return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def _logits_of(keys, pointer):
    """In float32; of keys of what is no number, a very small one."""
    bits = _ordered(keys >> 16).to(tl.int16).to(pointer.dtype.element_ty, bitcast=True)
    return tl.where(keys == -(2**31), -3e38, tl.maximum(bits.to(tl.float32), -3e38))


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _route_blocks_kernel(
    logits_ptr,  # [T, NUM_EXPERTS]
    weights_ptr,  # [T, TOP_K], written
    block_experts_ptr,  # [num_blocks], written: -1 for unused blocks
    pairs_ptr,  # [num_blocks * BLOCK_M], written: those past the last of an expert are T * TOP_K
    num_tokens,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # num_tokens, NUM_EXPERTS, TOP_K and the blocks of an expert, padded to powers of two
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    MOST: tl.constexpr,
    BLOCKS: tl.constexpr,  # num_blocks
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    token, expert, choice = tl.arange(0, TOKENS)[:, None], tl.arange(0, EXPERTS)[None, :], tl.arange(0, CHOICES)
    inside = (token < num_tokens) & (expert < NUM_EXPERTS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    loaded = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=inside, other=float("-inf"))
    logits = loaded.to(tl.float32)
    bits = tl.where(logits == 0, 0, loaded.to(tl.int16, bitcast=True).to(tl.int32))  # the zeros are equal
    # a logit and its expert, the lower the better, as one number; what is no number is last
    keys = tl.where(logits == logits, _ordered(bits) * 65536 + (65535 - expert), -(2**31))
    highest = _logits_of(tl.max(keys, 1), logits_ptr)
    total = tl.sum(tl.where(inside & (logits == logits), tl.exp(logits - highest[:, None]), 0.0), 1)
    weights = tl.zeros([TOKENS, CHOICES], tl.float32)
    numbers = tl.full([TOKENS, EXPERTS], TOP_K, tl.int32)  # of the choice; TOP_K: not chosen
    for number in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        weight = tl.exp(_logits_of(best, logits_ptr) - highest) / tl.maximum(total, 1e-30)
        weights = tl.where(choice[None, :] == number, weight[:, None], weights)
        found = (keys == best[:, None]) & (keys > -(2**31)) & inside
        numbers = tl.where(found, number, numbers)
        keys = tl.where(found, -(2**31), keys)
    if NORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 1), 1e-30)[:, None]
    of_weights = (token < num_tokens) & (choice < TOP_K)[None, :]
    tl.store(weights_ptr + token * TOP_K + choice[None, :], weights.to(weights_ptr.dtype.element_ty), mask=of_weights)

    chosen = (inside & (numbers < TOP_K)).to(tl.int32)
    counts = tl.sum(chosen, 0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.cumsum(blocks, 0) - blocks
    slot = first_block[None, :] * BLOCK_M + tl.cumsum(chosen, 0) - chosen
    tl.store(pairs_ptr + slot, token * TOP_K + numbers, mask=chosen > 0)
    i = tl.arange(0, BLOCK_M)[:, None]
    padding = first_block[None, :] * BLOCK_M + counts[None, :] + i
    free = (blocks * BLOCK_M - counts)[None, :]
    tl.store(pairs_ptr + padding, tl.zeros([BLOCK_M, EXPERTS], tl.int32) + num_tokens * TOP_K, mask=i < free)
    i = tl.arange(0, MOST)[:, None]
    own = tl.zeros([MOST, EXPERTS], tl.int32) + expert
    tl.store(block_experts_ptr + first_block[None, :] + i, own, mask=i < blocks[None, :])
    block = tl.arange(0, BLOCKS)
    unused = (block >= tl.sum(blocks, 0)) & (block < num_blocks)
    tl.store(block_experts_ptr + block, tl.full([BLOCKS], -1, tl.int32), mask=unused)


def route_blocks(
    logits: Tensor,  # [T, experts], of 16 bits
    top_k: int,
    *,
    normalize: bool,
    block_m: int,
    pdl: bool = False,
) -> tuple[Tensor, Blocks]:
    """Weights of logits' type, [T, top_k], and the blocks of the chosen experts."""
    (num_tokens, num_experts), device = logits.shape, logits.device
    assert (
        logits.is_contiguous()
        and logits.dtype.itemsize == 2
        and top_k <= num_experts
        and blocks_serve(num_tokens, num_experts)
    )
    num_pairs = num_tokens * top_k
    num_blocks = min(num_pairs, num_experts) + num_pairs // block_m
    weights = logits.new_empty(num_tokens, top_k)
    pairs = torch.empty(num_blocks * block_m, dtype=torch.int32, device=device)
    block_experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    tokens, experts = next_power_of_2(num_tokens), next_power_of_2(num_experts)
    launch(
        _route_blocks_kernel,
        (1,),
        logits,
        weights,
        block_experts,
        pairs,
        num_tokens,
        num_blocks,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALIZE=normalize,
        TOKENS=tokens,
        EXPERTS=experts,
        CHOICES=next_power_of_2(top_k),
        MOST=next_power_of_2(cdiv(tokens, block_m)),
        BLOCKS=next_power_of_2(min(tokens * top_k, num_experts) + tokens * top_k // block_m),
        BLOCK_M=block_m,
        PDL=pdl,
        num_warps=min(16, max(4, tokens * experts // 128)),
        pdl=pdl,
    )
    return weights, Blocks(block_experts, pairs)
