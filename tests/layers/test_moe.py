"""The experts' output for a token does not depend on the other tokens of the batch, nor on who computes it."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.layers.moe import MoE
from nanovllm.layers.moe_spec import ClampedGlu, MoeSpec
from nanovllm.layers.residual import Residual
from nanovllm.layers.shared_expert import SharedExpertMoE
from nanovllm.layers.shared_expert_spec import SharedExpertSpec
from nanovllm.layers.split_k_residual import SplitKResidual
from tests.kernels.support import DEVICE
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


SIZES = {
    "hidden_size": 32, "intermediate_size": 24, "num_experts": 8, "num_experts_per_token": 3, "norm_topk_prob": True
}  # fmt: skip
LAYERS: dict[str, tuple[type[MoE], MoeSpec]] = {
    "alone": (MoE, MoeSpec(**SIZES)),
    "with biases": (MoE, MoeSpec(**SIZES, bias=True, activation=ClampedGlu(alpha=1.7, limit=7.0))),
    "beside a shared expert": (SharedExpertMoE, SharedExpertSpec(**SIZES, shared_size=40)),
}


@pytest.mark.parametrize("num_tokens", [1, 4, 5])  # at the bounds of what computes the router, too
@pytest.mark.parametrize("layer", LAYERS)
def test_same_numbers_with_kernels(layer: str, num_tokens: int) -> None:
    """The norm's weight is float32, as are all that are stored with an offset, and partial sums are yet to be added."""
    kind, spec = LAYERS[layer]
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 32, generator=generator).to(DEVICE, torch.float16)
    sums = torch.randn(3, num_tokens, 32, generator=generator).to(DEVICE)
    found = []
    for kernels in (False, True):
        built_with = context(torch.float16, torch.device(DEVICE), kernels=kernels)
        torch.manual_seed(0)
        moe, norm = kind(spec, built_with), make_norm(32, built_with, offset=1.0)
        for slot in moe.slots().values():
            slot.load(InMemory(torch.randn(slot.shape) * 0.3))
        moe.finish_loading()
        norm.finish_loading()
        stream = SplitKResidual(x.clone()) if kernels else Residual((x.float() + sums.sum(0)).half())
        if isinstance(stream, SplitKResidual):
            stream.add_later(sums)
        found.append(moe(stream, norm=norm).rows)
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)
    assert (found[0] - x).abs().max() > 0.5


def test_parts_of_choices_are_added_to_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may leave the sum over a token's choices to the next norm."""
    moe = make_moe(norm_topk_prob=True)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    parts = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(2))

    def in_parts(_: torch.Tensor, *, in_parts: bool, **__: object) -> torch.Tensor:
        assert in_parts
        return parts

    monkeypatch.setattr(moe, "_kernels", in_parts)
    rows = moe(Residual(x.clone()), norm=make_norm(32, context())).rows
    torch.testing.assert_close(rows, x + parts.sum(0))
