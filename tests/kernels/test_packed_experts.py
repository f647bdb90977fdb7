"""Experts with packed weights against the plain computation on the unpacked ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.linear.packed import PackedWords, dequantize_reference
from nanovllm.kernels.moe import packed
from nanovllm.kernels.moe.experts import experts_forward, experts_forward_reference
from tests.kernels.packed_weights import CASES, random_packed
from tests.kernels.support import DEVICE

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
TOLERANCE = 4e-3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).half()


def check(actual: Tensor, expected: Tensor) -> None:
    assert (actual.double() - expected.double()).abs().max() / expected.double().abs().max() < TOLERANCE


def weights_of(
    case: str, hidden: int, size: int, num_experts: int = 5
) -> tuple[PackedWords, PackedWords, dict[str, Any]]:
    shapes = (2 * size, hidden), (hidden, size)
    gate_up, down = (random_packed(num_experts, *shape, **CASES[case]) for shape in shapes)
    return gate_up, down, {"gate_up": dequantize_reference(gate_up), "down": dequantize_reference(down)}


@pytest.mark.parametrize(
    ("case", "num_tokens"),
    [("int4 zero", 1), ("fp8 blocks", 5), ("mxfp4", 23), ("int4 minimum", 3)],
)
def test_experts(case: str, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    gate_up, down, dense = weights_of(case, 128, 128)
    options: dict[str, Any] = {"residual": random(num_tokens, 128)}
    if case == "mxfp4":  # as in gpt-oss
        options |= {"gate_up_bias": random(5, 256), "down_bias": random(5, 128), "alpha": 1.7, "limit": 2.0}
    if case == "fp8 blocks":  # as in Gemma 4
        options |= {"gelu": True}
    choices = torch.rand(num_tokens, 5).argsort(dim=1)[:, :2].to(DEVICE, torch.int32).contiguous()
    choices[-1, 0] = 5  # no expert
    routed = {"weights": random(num_tokens, 2).abs(), "experts": choices}
    x = random(num_tokens, 128)
    expected = experts_forward_reference(x, **dense, **routed, **options)
    check(experts_forward(x, gate_up, down, **routed, **options), expected)


def test_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many tokens."""
    monkeypatch.setattr(packed, "UNPACKED_PAIRS", 0)
    monkeypatch.setattr(packed, "_packed_experts_kernel", None)
    gate_up, down, dense = weights_of("mxfp4", 64, 64, num_experts=2)
    biases = {"gate_up_bias": random(2, 128), "down_bias": random(2, 64), "alpha": 1.7, "limit": 2.0}
    experts = torch.tensor([[0, 1], [1, 2], [1, 0]]).to(DEVICE, torch.int32)
    routed = {"weights": random(3, 2).abs(), "experts": experts}
    x, residual = random(3, 64), random(3, 64)
    expected = experts_forward_reference(x, **dense, **routed, **biases, residual=residual)
    check(experts_forward(x, gate_up, down, **routed, **biases, residual=residual), expected)


def test_deterministic() -> None:
    """A token's bits do not depend on the other tokens."""
    torch.manual_seed(0)
    gate_up, down, _ = weights_of("int4 zero 32", 64, 64)
    x, weights, experts = random(3, 64), random(3, 2), torch.tensor([[0, 1], [3, 0], [0, 2]]).to(DEVICE, torch.int32)
    together = experts_forward(x, gate_up, down, weights, experts, deterministic=True)
    alone = experts_forward(x[1:2], gate_up, down, weights[1:2], experts[1:2], deterministic=True)
    assert torch.equal(alone, together[1:2])
