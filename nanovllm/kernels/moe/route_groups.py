"""Routing of DeepSeek's experts in one launch: scores, the best groups, the best experts of these, and their weights.

The reference on torch is `choose_in_groups` in layers/grouped_moe.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launch


@triton.jit
def choose_experts(
    logits,  # [EXPERTS], -inf past NUM_EXPERTS
    bias,  # [EXPERTS]; not used unless SIGMOID
    scaling,
    least_sum,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """The weights and the experts of a token, [CHOICES], of which the first TOP_K count."""
    EXPERTS: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    GROUPS: tl.constexpr = triton.next_power_of_2(NUM_GROUPS)
    CHOICES: tl.constexpr = triton.next_power_of_2(TOP_K)
    expert, choice, number = tl.arange(0, EXPERTS), tl.arange(0, CHOICES), tl.arange(0, GROUPS)
    inside = expert < NUM_EXPERTS
    group = expert // (NUM_EXPERTS // NUM_GROUPS)
    if SIGMOID:
        scores = tl.sigmoid(logits)
        ranking = tl.where(inside, scores + bias, float("-inf"))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
        ranking = tl.where(inside, scores, float("-inf"))

    if NUM_GROUPS > 1:
        best_of_groups = tl.full((GROUPS,), float("-inf"), tl.float32)
        for each in tl.static_range(NUM_GROUPS):
            own = tl.where(group == each, ranking, float("-inf"))
            best, index = tl.max(own, 0, return_indices=True)
            if SIGMOID:
                best += tl.max(tl.where(expert == index, float("-inf"), own), 0)
            best_of_groups = tl.where(number == each, best, best_of_groups)
        allowed = expert < 0
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            best, index = tl.max(best_of_groups, 0, return_indices=True)
            allowed = allowed | (group == index)
            best_of_groups = tl.where(number == index, float("-inf"), best_of_groups)
        ranking = tl.where(allowed, ranking, float("-inf"))

    weights = tl.zeros([CHOICES], tl.float32)
    chosen = tl.zeros([CHOICES], tl.int32)
    for each in tl.static_range(TOP_K):
        best, index = tl.max(ranking, 0, return_indices=True)
        weights = tl.where(choice == each, tl.sum(tl.where(expert == index, scores, 0.0), 0), weights)
        chosen = tl.where(choice == each, index, chosen)
        ranking = tl.where(expert == index, float("-inf"), ranking)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 0) + least_sum)
    return weights * scaling, chosen


@triton.jit
def _route_groups_kernel(
    logits_ptr,  # [T, NUM_EXPERTS]
    bias_ptr,  # [NUM_EXPERTS], or None: softmax scores
    weights_ptr,  # [T, TOP_K]
    experts_ptr,  # [T, TOP_K]
    scaling,
    least_sum,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS)), tl.arange(0, triton.next_power_of_2(TOP_K))
    inside = expert < NUM_EXPERTS
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=inside, other=float("-inf"))
    weights, chosen = choose_experts(
        logits, bias, scaling, least_sum,
        NUM_EXPERTS, NUM_GROUPS, NUM_CHOSEN_GROUPS, TOP_K, bias_ptr is not None, NORMALIZE,
    )  # fmt: skip
    offsets = token * TOP_K + choice
    tl.store(weights_ptr + offsets, weights.to(weights_ptr.dtype.element_ty), mask=choice < TOP_K)
    tl.store(experts_ptr + offsets, chosen, mask=choice < TOP_K)


def route_in_groups(
    logits: Tensor,  # [T, experts] float32
    bias: Tensor | None,  # [experts] float32; None = softmax scores
    *,
    top_k: int,
    num_groups: int,
    num_chosen_groups: int,
    normalize: bool,
    scaling: float,
    least_sum: float,
    dtype: torch.dtype,  # of the weights
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weights and experts, as int32, both [T, top_k]. `bias` is added to sigmoid scores for the choice alone."""
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous() and top_k <= num_experts // num_groups * num_chosen_groups
    weights = torch.empty(num_tokens, top_k, dtype=dtype, device=logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    if num_tokens:
        launch(
            _route_groups_kernel,
            (num_tokens,),
            logits,
            bias,
            weights,
            experts,
            scaling,
            least_sum,
            NUM_EXPERTS=num_experts,
            NUM_GROUPS=num_groups,
            NUM_CHOSEN_GROUPS=num_chosen_groups,
            TOP_K=top_k,
            NORMALIZE=normalize,
            PDL=pdl,
            num_warps=1,
            pdl=pdl,
        )
    return weights, experts
