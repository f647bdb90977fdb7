"""The experts' output for a token does not depend on the other tokens of the batch."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.moe import MoE
from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.residual import Residual
from tests.layers.build import context, make_norm


def make_moe(*, norm_topk_prob: bool) -> MoE:
    spec = MoeSpec(
        hidden_size=32, intermediate_size=24, num_experts=8, num_experts_per_token=3, norm_topk_prob=norm_topk_prob
    )
    moe = MoE(spec, context())
    generator = torch.Generator().manual_seed(0)
    for weight in (moe.router.weight, moe.gate_up, moe.down):
        weight.tensor.normal_(0.0, 0.3, generator=generator)
    return moe


def one_token(moe: MoE, x: torch.Tensor, *, norm_topk_prob: bool) -> torch.Tensor:
    """[hidden] -> [hidden], one expert at a time."""
    probabilities = (moe.router.weight.tensor @ x).softmax(dim=0)
    weights, experts = probabilities.topk(3)
    if norm_topk_prob:
        weights = weights / weights.sum()
    out = torch.zeros_like(x)
    for weight, expert in zip(weights, experts.tolist(), strict=True):
        gate, up = (moe.gate_up.tensor[expert] @ x).chunk(2)
        out += weight * (moe.down.tensor[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_equals_token_by_token(num_tokens: int, norm_topk_prob: bool) -> None:
    moe = make_moe(norm_topk_prob=norm_topk_prob)
    x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(1))
    norm = make_norm(32, context())
    normed = [one_token(moe, row, norm_topk_prob=norm_topk_prob) for row in norm(x)]
    expected = x + torch.stack(normed)
    torch.testing.assert_close(moe(Residual(x.clone()), norm=norm).rows, expected, atol=1e-5, rtol=1e-5)
