"""A mixture of experts beside a shared one, in three launches for a few tokens, against torch."""

from pathlib import Path

import pytest
import torch

from nanovllm.kernels.moe.experts import ROW_TOKENS, experts_forward_reference
from nanovllm.kernels.moe.shared_rows import GroupChoice, first_launch_reference, route_rows, shared_rows_forward
from nanovllm.layers.grouped_moe import choose_in_groups
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.support import DEVICE

HIDDEN, SIZE, SHARED, EPS = 72, 40, 50, 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


@pytest.mark.parametrize(("num_tokens", "dtype", "sigmoid"), [(1, torch.float16, True), (3, torch.float32, False)])
def test_against_torch(num_tokens: int, dtype: torch.dtype, sigmoid: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    spec = GroupedMoeSpec(
        hidden_size=HIDDEN,
        intermediate_size=SIZE,
        num_experts=10,
        num_experts_per_token=3,
        norm_topk_prob=sigmoid,
        shared_size=SHARED,
        scoring="sigmoid" if sigmoid else "softmax",
        num_groups=2,
        num_chosen_groups=1,
        scaling=1.8,
    )
    choice = GroupChoice(3, 2, 1, sigmoid, spec.scaling, spec.least_sum)
    x, gain = random(num_tokens, HIDDEN), random(HIDDEN)
    router = random(10, HIDDEN, dtype=torch.float32) * 0.3
    bias = random(10, dtype=torch.float32) if sigmoid else None
    gate_up, down = random(10, 2 * SIZE, HIDDEN) * 0.1, random(10, HIDDEN, SIZE) * 0.1
    shared_gate_up, shared_down = random(2 * SHARED, HIDDEN) * 0.1, random(HIDDEN, SHARED) * 0.1
    arrived = torch.zeros(ROW_TOKENS, dtype=torch.int32, device=DEVICE)

    normed, logits, hidden = first_launch_reference(x, gain, EPS, router, shared_gate_up)
    weights, experts = choose_in_groups(logits, spec, bias)
    routed = route_rows(x, gain, EPS, router, bias, shared_gate_up, choice, arrived)
    assert torch.equal(routed.experts.long(), experts) and not arrived.any()
    tolerance = TOLERANCE[dtype]
    for ours, theirs in ((routed.normed, normed), (routed.weights, weights.to(dtype)), (routed.shared, hidden)):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

    expected = experts_forward_reference(normed, gate_up, down, weights, experts, residual=x).float()
    expected += hidden.float() @ shared_down.float().t()
    y = shared_rows_forward(
        x.clone(),
        gain,
        EPS,
        router=router,
        bias=bias,
        choice=choice,
        gate_up=gate_up,
        down=down,
        shared_gate_up=shared_gate_up,
        shared_down=shared_down,
        arrived=arrived,
        out=x,
        residual=x,
    )
    assert y is x
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=2 * tolerance)


COMPILE = """
from nanovllm.kernels.moe import rows, shared_rows
rows.launch = shared_rows.launch = compile
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)
x, numbers = empty(1, 2048), empty(4, dtype=torch.int32)
shared_rows.shared_rows_forward(
    x, empty(2048), 1e-5,
    router=empty(64, 2048, dtype=torch.float32), bias=empty(64, dtype=torch.float32),
    choice=shared_rows.GroupChoice(4, 1, 1, True, 1.8, 1e-20),
    gate_up=empty(64, 3072, 2048), down=empty(64, 2048, 1536),
    shared_gate_up=empty(3072, 2048), shared_down=empty(2048, 1536), arrived=numbers, out=x, residual=x, pdl=True,
)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    """With the sizes of GLM-4.7-Flash."""
    found = [one.kernel for one in compile_for_hopper(COMPILE, tmp_path)]
    assert found == ["_route_rows_kernel", "_gate_up_row_kernel", "_down_row_kernel"]
