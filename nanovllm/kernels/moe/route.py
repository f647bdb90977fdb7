"""Routing in one launch: softmax over the router's logits, top-k experts and their weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launch, next_power_of_2


def route_reference(
    logits: Tensor, top_k: int, *, normalize: bool, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights and experts [T, top_k], the most likely first; among equals the lowest expert first.

    `factors`: [experts], multiplied with the weights at the end.
    """
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, :top_k]
    weights = logits.float().softmax(dim=-1).gather(1, experts)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if factors is not None:
        weights = weights * factors.float()[experts]
    return weights.to(logits.dtype), experts


@triton.jit
def top_experts(logits, expert, choice, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr):
    """The weights and the indices of the TOP_K highest of `logits`, both of the shape of `choice`."""
    highest = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - highest), 0)
    weights = tl.zeros(choice.shape, tl.float32)
    chosen = tl.zeros(choice.shape, tl.int32)
    for number in tl.static_range(TOP_K):
        best, index = tl.max(logits, 0, return_indices=True)
        weights = tl.where(choice == number, tl.exp(best - highest) / total, weights)
        chosen = tl.where(choice == number, index, chosen)
        logits = tl.where(expert == index, float("-inf"), logits)
    if NORMALIZE:
        weights = weights / tl.sum(weights, 0)
    return weights, chosen


@triton.jit
def _route_kernel(
    logits_ptr,  # [T, NUM_EXPERTS]
    factors_ptr,  # [NUM_EXPERTS], or None
    weights_ptr,  # [T, TOP_K]
    experts_ptr,  # [T, TOP_K]
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,  # NUM_EXPERTS, padded to a power of two
    CHOICES: tl.constexpr,  # TOP_K, padded to a power of two
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=expert < NUM_EXPERTS, other=float("-inf"))
    logits = logits.to(tl.float32)
    weights, chosen = top_experts(logits, expert, choice, TOP_K, NORMALIZE)
    if factors_ptr is not None:
        known = (chosen >= 0) & (chosen < NUM_EXPERTS)  # not so for logits that are no numbers
        weights *= tl.load(factors_ptr + chosen, mask=known, other=0.0).to(tl.float32)
    offsets = token * TOP_K + choice
    tl.store(weights_ptr + offsets, weights.to(weights_ptr.dtype.element_ty), mask=choice < TOP_K)
    tl.store(experts_ptr + offsets, chosen, mask=choice < TOP_K)


def route(
    logits: Tensor, top_k: int, *, normalize: bool, factors: Tensor | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Weights of logits' type and experts as int32, both [T, top_k]; see the reference."""
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous() and top_k <= num_experts
    weights = logits.new_empty(num_tokens, top_k)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    if num_tokens:
        launch(
            _route_kernel,
            (num_tokens,),
            logits,
            factors,
            weights,
            experts,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            NORMALIZE=normalize,
            EXPERTS=next_power_of_2(num_experts),
            CHOICES=next_power_of_2(top_k),
            PDL=pdl,
            num_warps=1,
            pdl=pdl,
        )
    return weights, experts
