"""Norm, router and choice in one launch for tens to hundreds of tokens, against torch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.moe import route_tokens as module
from nanovllm.kernels.moe.route import route_reference
from nanovllm.kernels.moe.route_rows import route_rows_reference
from nanovllm.kernels.moe.route_tokens import route_tokens
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.support import DEVICE

EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_experts", "dtype", "splits", "biased"),
    [(5, 72, 10, torch.float32, 0, True), (7, 300, 32, torch.float32, 3, False), (4, 2880, 32, torch.float16, 1, True)],
)
def test_against_torch(
    num_tokens: int, hidden: int, num_experts: int, dtype: torch.dtype, splits: int, biased: bool, each: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "ONE_EACH", num_tokens if each == 1 else 0)
    x, gain = random(num_tokens, hidden, dtype=dtype, seed=1), random(hidden, dtype=dtype, seed=2)
    router = random(num_experts, hidden, dtype=dtype, seed=3) * 0.1
    bias = random(num_experts, dtype=dtype, seed=4) if biased else None
    sums = random(splits, num_tokens, hidden, dtype=dtype, seed=5) if splits else None
    rows, normed, logits, _ = route_rows_reference(x, gain, EPS, router, router_bias=bias, partial_sums=sums)
    weights, experts = route_reference(logits, 4, normalize=True)

    options = {"top_k": 4, "normalize": True, "router_bias": bias, "partial_sums": sums}
    found = route_tokens(x, gain, EPS, router, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for ours, theirs in zip((x, *found[:2]), (rows, normed, weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[2].long(), experts)


def test_choices_are_experts_for_what_is_no_number() -> None:
    x = torch.full((3, 64), float("nan"), device=DEVICE)
    router = random(6, 64, dtype=torch.float32, seed=0)
    *_, experts = route_tokens(x, torch.ones(64, device=DEVICE), EPS, router, top_k=2, normalize=True)
    assert ((experts >= 0) & (experts < 6)).all()


COMPILE = """
from nanovllm.kernels.moe import route_tokens
route_tokens.launch = compile
x, gain = torch.empty(200, 2880, dtype=torch.bfloat16), torch.empty(2880, dtype=torch.bfloat16)
router, sums = torch.empty(32, 2880, dtype=torch.bfloat16), torch.empty(1, 200, 2880, dtype=torch.bfloat16)
options = {"top_k": 4, "normalize": True, "router_bias": torch.empty(32, dtype=torch.bfloat16), "pdl": True}
route_tokens.route_tokens(x, gain, 1e-5, router, partial_sums=sums, **options)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    (compiled,) = compile_for_hopper(COMPILE, tmp_path)
    assert (compiled.kernel, compiled.num_programs) == ("_route_tokens_kernel", 100)
