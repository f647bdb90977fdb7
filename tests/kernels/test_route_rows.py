"""What comes before the chosen experts in one launch for a few tokens, and all experts in three, against torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.moe.experts import ROW_TOKENS, experts_forward, experts_forward_reference
from nanovllm.kernels.moe.route import route_reference
from nanovllm.kernels.moe.route_rows import Choice, route_rows, route_rows_reference
from nanovllm.layers.grouped_moe import choose_in_groups
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.support import DEVICE

HIDDEN, SIZE, SHARED, EXPERTS, EPS = 72, 40, 50, 10, 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


class Random:
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(DEVICE, dtype or self._dtype)


def check_choice(
    x: Tensor, gain: Tensor, router: Tensor, choice: Choice, chosen: Any, **options: Tensor | None
) -> tuple[Any, Tensor, Tensor]:
    """`chosen`: weights and experts for logits. Returns what was found, and weights and experts as expected."""
    arrived = torch.zeros(ROW_TOKENS, dtype=torch.int32, device=DEVICE)
    found = route_rows(x.clone(), gain, EPS, router, choice=choice, arrived=arrived, **options)
    options.pop("bias_of_choice", None)
    rows, normed, logits, hidden = route_rows_reference(x, gain, EPS, router, **options)
    weights, experts = chosen(logits)
    assert torch.equal(found.experts.long(), experts) and not arrived.any()
    tolerance = TOLERANCE[x.dtype]
    pairs = [(found.rows, rows), (found.normed, normed), (found.weights, weights.to(x.dtype))]
    for ours, theirs in pairs if hidden is None else [*pairs, (found.shared, hidden)]:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return found, weights, experts


@pytest.mark.parametrize(("num_tokens", "dtype", "sigmoid"), [(1, torch.float16, True), (3, torch.float32, False)])
def test_groups_beside_a_shared_expert(num_tokens: int, dtype: torch.dtype, sigmoid: bool) -> None:
    random = Random(dtype, num_tokens)
    spec = GroupedMoeSpec(
        hidden_size=HIDDEN,
        intermediate_size=SIZE,
        num_experts=EXPERTS,
        num_experts_per_token=3,
        norm_topk_prob=sigmoid,
        shared_size=SHARED,
        scoring="sigmoid" if sigmoid else "softmax",
        num_groups=2,
        num_chosen_groups=1,
        scaling=1.8,
    )
    choice = Choice(3, sigmoid, 2, 1, spec.scaling, spec.least_sum)
    x, gain = random(num_tokens, HIDDEN), random(HIDDEN)
    router = random(EXPERTS, HIDDEN, dtype=torch.float32) * 0.3
    bias = random(EXPERTS, dtype=torch.float32) if sigmoid else None
    gate_up, down = random(EXPERTS, 2 * SIZE, HIDDEN) * 0.1, random(EXPERTS, HIDDEN, SIZE) * 0.1
    shared_gate_up, shared_down = random(2 * SHARED, HIDDEN) * 0.1, random(HIDDEN, SHARED) * 0.1

    found, weights, experts = check_choice(
        x,
        gain,
        router,
        choice,
        lambda logits: choose_in_groups(logits, spec, bias),
        bias_of_choice=bias,
        shared_gate_up=shared_gate_up,
    )
    assert found.shared is not None
    expected = experts_forward_reference(found.normed, gate_up, down, weights, experts, residual=x).float()
    expected += found.shared.float() @ shared_down.float().t()
    shared = (found.shared, shared_down)
    y = experts_forward(found.normed, gate_up, down, found.weights, found.experts, residual=x, shared=shared)
    assert y is x
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "normalize", "splits"),
    [(1, torch.float16, True, 0), (2, torch.float32, False, 3), (4, torch.float16, True, 0)],
)
def test_softmax(num_tokens: int, dtype: torch.dtype, normalize: bool, splits: int) -> None:
    """With a bias, a gate of the shared expert or none, and partial sums; weights of the norm in float32."""
    random = Random(dtype, num_tokens)
    x, gain, router = random(num_tokens, HIDDEN), random(HIDDEN, dtype=torch.float32), random(EXPERTS, HIDDEN) * 0.3
    options: dict[str, Tensor | None] = {"partial_sums": random(splits, num_tokens, HIDDEN, dtype=torch.float32)}
    options = options if splits else {"router_bias": random(EXPERTS)}
    if num_tokens < 4:
        options |= {"shared_gate_up": random(2 * SHARED, HIDDEN) * 0.1, "shared_gate": random(1, HIDDEN) * 0.1}

    def chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
        return route_reference(logits, 3, normalize=normalize)

    check_choice(x, gain, router, Choice(3, normalize), chosen, **options)


def test_nearly_equal_experts() -> None:
    """Where logits are equal in bfloat16, another order than that of the exact ones is right, also another expert at
    the end, but none that is worse by more than the rounding."""
    num_experts, top_k = 256, 8
    random = Random(torch.bfloat16, 0)
    x, gain, router = random(ROW_TOKENS, HIDDEN), random(HIDDEN, dtype=torch.float32), random(num_experts, HIDDEN) * 0.1
    router[1::2] = router[::2]  # in pairs
    router[1::2, 0] *= 1.01
    arrived = torch.zeros(ROW_TOKENS, dtype=torch.int32, device=DEVICE)
    found = route_rows(x, gain, EPS, router, choice=Choice(top_k, True), arrived=arrived)
    experts, exact = found.experts.long(), found.normed.double() @ router.double().t()
    assert all(len(set(row)) == top_k for row in experts.tolist())
    best, in_order = exact.topk(top_k)
    assert not torch.equal(experts, in_order)
    step = 2.0**-7  # of bfloat16, relative; each of two logits is rounded by at most half of it
    # the nth choice is as good as the nth best, up to the rounding of both
    assert ((exact.gather(1, experts) - best).abs() <= 1.01 * step * best.abs()).all()
    weights, _ = route_reference(exact.bfloat16(), top_k, normalize=True)
    torch.testing.assert_close(found.weights, weights, rtol=exact.abs().max().item() * step, atol=0.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_equal_experts_and_no_numbers() -> None:
    """Among equals the first are chosen. Logits that are no numbers have experts, too."""
    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[1] = float("nan")
    router = torch.ones(EXPERTS, HIDDEN, device=DEVICE)
    arrived = torch.zeros(ROW_TOKENS, dtype=torch.int32, device=DEVICE)
    found = route_rows(x, torch.ones(HIDDEN, device=DEVICE), EPS, router, choice=Choice(4, True), arrived=arrived)
    assert found.experts.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert found.weights[0].tolist() == [0.25] * 4 and found.weights[1].isnan().all()


COMPILE = """
from nanovllm.kernels.moe import experts, route_rows, rows
rows.launch = route_rows.launch = compile
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)
x, numbers = empty(1, 2048), empty(16, dtype=torch.int32)
options = dict(arrived=numbers, shared_gate_up=empty({shared} * 2, 2048), pdl=True)
routed = route_rows.route_rows(x, empty(2048), 1e-5, {router}, **options)
experts.experts_forward(
    routed.normed, empty({experts}, 2 * {size}, 2048), empty({experts}, 2048, {size}), routed.weights, routed.experts,
    residual=x, shared=(routed.shared, empty(2048, {shared})), pdl=True,
)
"""
GLM = {  # 4.7 Flash
    "router": "empty(64, 2048, dtype=torch.float32), bias_of_choice=empty(64, dtype=torch.float32), "
    "choice=route_rows.Choice(4, True, 1, 1, 1.8, 1e-20)",
    "experts": 64,
    "size": 1536,
    "shared": 1536,
}
QWEN = {  # 3.6 35B A3B
    "router": "empty(256, 2048), choice=route_rows.Choice(8, True), shared_gate=empty(1, 2048), "
    "partial_sums=empty(4, 1, 2048, dtype=torch.float32)",
    "experts": 256,
    "size": 512,
    "shared": 512,
}


@pytest.mark.parametrize("sizes", [GLM, QWEN])
def test_compiles_for_hopper(sizes: dict[str, Any], tmp_path: Path) -> None:
    found = [one.kernel for one in compile_for_hopper(COMPILE.format(**sizes), tmp_path)]
    assert found == ["_route_rows_kernel", "_gate_up_row_kernel", "_down_row_kernel"]
