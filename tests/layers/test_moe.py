"""The experts' output for a token does not depend on the other tokens of the batch."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.moe import MoE


def make_moe(*, norm_topk_prob: bool) -> MoE:
    moe = MoE(
        hidden_size=32,
        intermediate_size=24,
        num_experts=8,
        num_experts_per_token=3,
        norm_topk_prob=norm_topk_prob,
        dtype=torch.float32,
        device=torch.device("cpu"),
        deterministic=False,
    )
    generator = torch.Generator().manual_seed(0)
    for weight in (moe.gate.weight, moe.gate_up, moe.down):
        weight.normal_(0.0, 0.3, generator=generator)
    return moe


def one_token(moe: MoE, x: torch.Tensor, *, norm_topk_prob: bool) -> torch.Tensor:
    """[hidden] -> [hidden], one expert at a time."""
    probabilities = (moe.gate.weight @ x).softmax(dim=0)
    weights, experts = probabilities.topk(3)
    if norm_topk_prob:
        weights = weights / weights.sum()
    out = torch.zeros_like(x)
    for weight, expert in zip(weights, experts.tolist(), strict=True):
        gate, up = (moe.gate_up[expert] @ x).chunk(2)
        out += weight * (moe.down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_equals_token_by_token(num_tokens: int, norm_topk_prob: bool) -> None:
    moe = make_moe(norm_topk_prob=norm_topk_prob)
    x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([one_token(moe, row, norm_topk_prob=norm_topk_prob) for row in x])
    torch.testing.assert_close(moe(x), expected, atol=1e-5, rtol=1e-5)
