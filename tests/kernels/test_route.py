"""The MoE router in one launch against sorting all experts."""

from typing import Any

import pytest
import torch

from nanovllm.kernels.moe.route import route, route_reference
from tests.kernels.support import DEVICE

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def check(logits: torch.Tensor, top_k: int, *, pdl: bool = False, **options: Any) -> None:
    weights, experts = route(logits, top_k, pdl=pdl, **options)
    expected_weights, expected_experts = route_reference(logits, top_k, **options)
    assert torch.equal(experts.long(), expected_experts)
    assert weights.dtype == logits.dtype
    torch.testing.assert_close(weights, expected_weights, rtol=TOLERANCE[logits.dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (5, 6, 2), (3, 60, 4), (7, 128, 8), (2, 7, 7), (0, 8, 2)]
)
def test_against_sorting(num_tokens: int, num_experts: int, top_k: int, normalize: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = (torch.randn(num_tokens, num_experts, generator=generator) * 3).to(dtype).to(DEVICE)
    check(logits, top_k, normalize=normalize)
    factors = torch.randn(num_experts, generator=generator).to(dtype).to(DEVICE)
    check(logits, top_k, normalize=normalize, factors=factors)


def test_of_equals_the_first_comes_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [0.0] * 6], device=DEVICE)
    check(logits, 4, normalize=True)
    assert route(logits, 4, normalize=True)[1].tolist() == [[1, 3, 5, 0], [0, 1, 2, 3]]


def test_logits_far_apart() -> None:
    logits = torch.tensor([[-1e4, 1e4, 0.0, -1e4], [-2e4, -1e4, -3e4, -4e4]], device=DEVICE)
    check(logits, 2, normalize=False)
    check(logits, 2, normalize=True)


def test_a_broken_token_breaks_no_other() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = route(logits, 2, normalize=True)
    logits[1, 3] = float("nan")
    weights, experts = route(logits, 2, normalize=True)
    assert weights[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(weights[row], expected[0][row]) and torch.equal(experts[row], expected[1][row])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_dependent_launch(num_tokens: int) -> None:
    check(torch.randn(num_tokens, 128, device=DEVICE).bfloat16(), 8, normalize=True, pdl=True)
