"""Experts with packed weights against the plain computation on the unpacked ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.linear.packed import PackedWords, dequantize_reference
from nanovllm.kernels.moe.experts import experts_forward, experts_forward_reference
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import CASES, random_packed
from tests.kernels.support import DEVICE

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
TOLERANCE = 4e-3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).half()


def check(actual: Tensor, expected: Tensor) -> None:
    assert (actual.double() - expected.double()).abs().max() / expected.double().abs().max() < TOLERANCE


def weights_of(case: str, hidden: int, size: int) -> tuple[PackedWords, PackedWords, dict[str, Any]]:
    gate_up, down = (random_packed(5, *shape, **CASES[case]) for shape in ((2 * size, hidden), (hidden, size)))
    return gate_up, down, {"gate_up": dequantize_reference(gate_up), "down": dequantize_reference(down)}


@pytest.mark.parametrize(
    ("case", "num_tokens"),
    [("int4 zero", 1), ("int8", 9), ("fp8 blocks", 12), ("mxfp4", 1), ("mxfp4", 70), ("int4 minimum", 3), ("nvfp4", 3)],
)
def test_experts(case: str, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    gate_up, down, dense = weights_of(case, 256, 128 if case != "int4 zero" else 256)
    options: dict[str, Any] = {"residual": random(num_tokens, 256)}
    if case == "mxfp4":  # as in gpt-oss
        options |= {"gate_up_bias": random(5, 256), "down_bias": random(5, 256), "alpha": 1.7, "limit": 2.0}
    choices = torch.rand(num_tokens, 5).argsort(dim=1)[:, :2].to(DEVICE, torch.int32).contiguous()
    choices[-1, 0] = 5  # no expert
    routed = {"weights": random(num_tokens, 2).abs(), "experts": choices}
    x = random(num_tokens, 256)
    expected = experts_forward_reference(x, **dense, **routed, **options)
    check(experts_forward(x, gate_up, down, **routed, **options), expected)


def test_deterministic() -> None:
    """A token's bits do not depend on the other tokens."""
    torch.manual_seed(0)
    gate_up, down, _ = weights_of("int4 zero 32", 128, 128)
    x, weights, experts = random(6, 128), random(6, 2), torch.tensor([[0, 1], [4, 0], [0, 2], [3, 0], [0, 4], [1, 0]])
    experts = experts.to(DEVICE, torch.int32)
    together = experts_forward(x, gate_up, down, weights, experts, deterministic=True)
    for token in (0, 3):
        own = slice(token, token + 1)
        alone = experts_forward(x[own], gate_up, down, weights[own], experts[own], deterministic=True)
        assert torch.equal(alone, together[own])


COMPILE = """
from nanovllm.kernels.linear import packed_tiled
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.moe import grouped, packed
from nanovllm.kernels.moe.experts import experts_forward

grouped.launch = packed.launch = compile
packed_tiled._device_limits = lambda: (132, 232_448)

def mxfp4(n, k):
    words = torch.empty(8, n, k // 8, dtype=torch.int32)
    return PackedWords("fp4", 32, words, torch.empty(8, n, k // 32, dtype=torch.uint8))

half = dict(dtype=torch.bfloat16)
x, choices = torch.empty(16, 1024, **half), torch.empty(16, 2, dtype=torch.int32)
experts_forward(x, mxfp4(512, 1024), mxfp4(1024, 256), torch.empty(16, 2, **half), choices, pdl=True)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = [one for one in compile_for_hopper(COMPILE, tmp_path) if one.kernel == "_packed_experts_kernel"]
    assert len(found) == 2 and all("wgmma" in one.instructions for one in found)
