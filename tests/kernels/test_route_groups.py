"""Routing among the experts of the best groups, in one launch, against torch."""

from typing import Literal

import pytest
import torch

from nanovllm.kernels.moe.route_groups import route_in_groups
from nanovllm.layers.grouped_moe import choose_in_groups
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from tests.kernels.support import DEVICE


@pytest.mark.parametrize(
    ("num_experts", "num_groups", "num_chosen", "top_k", "scoring", "normalize"),
    [
        (64, 1, 1, 4, "sigmoid", True),  # GLM-4.7-Flash
        (64, 1, 1, 6, "softmax", False),  # DeepSeek-V2-Lite
        (160, 8, 3, 6, "softmax", False),  # DeepSeek-V2
        (256, 8, 4, 8, "sigmoid", True),  # DeepSeek-V3
        (12, 3, 2, 8, "sigmoid", False),
    ],
)
def test_against_torch(
    num_experts: int,
    num_groups: int,
    num_chosen: int,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    normalize: bool,
) -> None:
    spec = GroupedMoeSpec(
        hidden_size=1,
        intermediate_size=1,
        num_experts=num_experts,
        num_experts_per_token=top_k,
        norm_topk_prob=normalize,
        shared_size=1,
        scoring=scoring,
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        scaling=2.5,
        least_sum=0.5 if scoring == "sigmoid" else 1e-20,
    )
    generator = torch.Generator().manual_seed(num_experts)
    logits = (torch.randn(5, num_experts, generator=generator) * 3).to(DEVICE)
    bias = torch.randn(num_experts, generator=generator).to(DEVICE) if scoring == "sigmoid" else None
    weights, experts = route_in_groups(
        logits,
        bias,
        top_k=top_k,
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        normalize=normalize,
        scaling=spec.scaling,
        least_sum=spec.least_sum,
        dtype=torch.float32,
    )
    expected_weights, expected_experts = choose_in_groups(logits, spec, bias)
    assert torch.equal(experts.long(), expected_experts)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)
