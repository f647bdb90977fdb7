"""Experts with packed weights against the plain computation on the unpacked ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.linear.packed import PackedWords, dequantize_reference
from nanovllm.kernels.moe import packed
from nanovllm.kernels.moe.experts import experts_forward, experts_forward_reference
from nanovllm.kernels.moe.packed import choose_kernel
from nanovllm.kernels.moe.packed_rows import packed_expert_rows
from nanovllm.kernels.moe.weights import PackedExperts
from tests.kernels.packed_weights import CASES, random_packed
from tests.kernels.support import DEVICE

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < TOLERANCES[actual.dtype], error


def weights_of(
    case: str, hidden: int, size: int, num_experts: int = 5
) -> tuple[PackedWords, PackedWords, dict[str, Any]]:
    shapes = (2 * size, hidden), (hidden, size)
    gate_up, down = (random_packed(num_experts, *shape, **CASES[case]) for shape in shapes)
    return gate_up, down, {"gate_up": dequantize_reference(gate_up), "down": dequantize_reference(down)}


def routed(num_tokens: int, num_experts: int = 5, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Two experts for each token; the last one's first choice is no expert."""
    experts = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :2].to(DEVICE, torch.int32).contiguous()
    experts[-1, 0] = num_experts
    return {"weights": random(num_tokens, 2, dtype=dtype).abs(), "experts": experts}


@pytest.mark.parametrize(
    ("case", "num_tokens"),
    [("int4 zero", 6), ("fp8 blocks", 5), ("mxfp4", 23), ("int4 minimum", 3)],
)
def test_tiled(case: str, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    gate_up, down, dense = weights_of(case, 128, 128)
    options: dict[str, Any] = {"residual": random(num_tokens, 128)}
    if case == "mxfp4":  # as in gpt-oss
        options |= {"gate_up_bias": random(5, 256), "down_bias": random(5, 128), "alpha": 1.7, "limit": 2.0}
    if case == "fp8 blocks":  # as in Gemma 4
        options |= {"gelu": True}
    chosen = routed(num_tokens)
    x = random(num_tokens, 128)
    expected = experts_forward_reference(x, **dense, **chosen, **options)
    check(experts_forward(x, gate_up, down, **chosen, **options), expected)


def compare_rows(
    case: str, hidden: int, size: int, activation: str, num_tokens: int, *, grouped: bool, num_experts: int = 5
) -> None:
    torch.manual_seed(num_tokens)
    dtype = torch.bfloat16 if case == "mxfp4" else torch.float16
    gate_up, down, dense = weights_of(case, hidden, size, num_experts)
    x, residual, chosen = random(num_tokens, hidden, dtype=dtype), None, routed(num_tokens, num_experts, dtype)
    options: dict[str, Any] = {"gelu": True} if activation == "gelu" else {}
    if activation == "limit":
        biases = (random(num_experts, rows, dtype=dtype) for rows in (2 * size, hidden))
        options = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True)) | {"alpha": 1.7, "limit": 2.0}
        residual = random(num_tokens, hidden, dtype=dtype)
    expected = experts_forward_reference(x, **dense, **chosen, **options, residual=residual)
    layer, out = PackedExperts(gate_up, down, **options), torch.empty_like(x)
    check(packed_expert_rows(x, layer, **chosen, out=out, residual=residual, grouped=grouped, pdl=False), expected)


# the interpreter also multiplies what the choice that is no expert left unwritten; it is not added
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("case", "hidden", "size", "activation", "num_tokens", "grouped"),
    [
        ("mxfp4", 192, 64, "limit", 1, False),
        ("mxfp4", 64, 64, "", 3, True),
        ("int4 zero", 128, 128, "limit", 3, True),
        ("fp8 blocks", 128, 128, "gelu", 1, False),
    ],
)
def test_rows(case: str, hidden: int, size: int, activation: str, num_tokens: int, grouped: bool) -> None:
    compare_rows(case, hidden, size, activation, num_tokens, grouped=grouped, num_experts=3)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["", "limit", "gelu"])
@pytest.mark.parametrize("case", ["mxfp4", "int4", "int4 zero", "int4 rows", "int8", "fp8 rows", "fp8 blocks"])
def test_rows_of_all_shapes(case: str, activation: str) -> None:
    """Also numbers of columns that the warps do not divide, and outputs that no tile divides."""
    for hidden, size in ((128, 256), (1024, 384)) if case != "mxfp4" else ((192, 64), (2880, 320), (1024, 384)):
        for num_tokens, grouped in ((1, False), (2, False), (1, True), (9, True), (33, True)):
            compare_rows(case, hidden, size, activation, num_tokens, grouped=grouped)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_tokens", "kernels"),  # of MXFP4 with and without Gluon, int4, fp8
    [
        (32, 4, 1, "rows rows rows rows"),
        (32, 4, 7, "grouped_rows grouped_rows grouped_rows tiled"),
        (32, 4, 8, "wide grouped_rows grouped_rows tiled"),
        (8, 4, 7, "wide tiled tiled tiled"),
        (32, 4, 64, "wide tiled tiled tiled"),
        (32, 4, 4096, "wide unpacked unpacked unpacked"),
        (64, 10, 1, "grouped_rows grouped_rows grouped_rows tiled"),
    ],
)
def test_chosen_kernel(num_experts: int, top_k: int, num_tokens: int, kernels: str) -> None:
    mxfp4, int4, fp8 = (
        PackedExperts(*(random_packed(num_experts, *shape, **CASES[case]) for shape in ((256, 128), (128, 128))))
        for case in ("mxfp4", "int4", "fp8 blocks")
    )
    found = [
        choose_kernel(layer, num_tokens, top_k, torch.bfloat16, gluon=gluon)
        for layer, gluon in ((mxfp4, True), (mxfp4, False), (int4, True), (fp8, True))
    ]
    assert " ".join(found) == kernels
    # numbers times their scales have no room in float16
    assert choose_kernel(mxfp4, num_tokens, top_k, torch.float16, gluon=True) in ("tiled", "unpacked")


def test_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many tokens."""
    monkeypatch.setattr(packed, "UNPACKED_PAIRS", 0)
    monkeypatch.setattr(packed, "_packed_experts_kernel", None)
    gate_up, down, dense = weights_of("mxfp4", 64, 64, num_experts=2)
    biases = {"gate_up_bias": random(2, 128), "down_bias": random(2, 64), "alpha": 1.7, "limit": 2.0}
    experts = torch.tensor([[0, 1], [1, 2], [1, 0]]).to(DEVICE, torch.int32)
    chosen = {"weights": random(3, 2).abs(), "experts": experts}
    x, residual = random(3, 64), random(3, 64)
    expected = experts_forward_reference(x, **dense, **chosen, **biases, residual=residual)
    check(experts_forward(x, gate_up, down, **chosen, **biases, residual=residual), expected)


def test_deterministic() -> None:
    """A token's bits do not depend on the other tokens."""
    torch.manual_seed(0)
    gate_up, down, _ = weights_of("int4 zero 32", 64, 64)
    x, weights, experts = random(3, 64), random(3, 2), torch.tensor([[0, 1], [3, 0], [0, 2]]).to(DEVICE, torch.int32)
    together = experts_forward(x, gate_up, down, weights, experts, deterministic=True)
    alone = experts_forward(x[1:2], gate_up, down, weights[1:2], experts[1:2], deterministic=True)
    assert torch.equal(alone, together[1:2])
