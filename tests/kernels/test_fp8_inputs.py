"""Products of fp8 weights with inputs rounded to fp8, against the plain computation with the same rounding."""

from pathlib import Path

import pytest
import torch

from nanovllm.checkpoint.packed.words import WordOrder, from_words
from nanovllm.kernels.linear import fp8_inputs
from nanovllm.kernels.linear.fp8_inputs import fp8_linear, fp8_split_k_linear, round_inputs, round_inputs_reference
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.linear.packed import dequantize_reference
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import CASES, random_packed
from tests.kernels.support import DEVICE

TOLERANCE = 4e-3


@pytest.mark.parametrize("groups", [1, 3])
def test_rounded_inputs(groups: int) -> None:
    torch.manual_seed(groups)
    x = torch.randn(5, 2, 384, device=DEVICE).half()[:, 1]
    x[2] = 0
    codes, scale = round_inputs(x, groups, 64)
    rounded = from_words(codes, WordOrder(8, 64)).float().unflatten(1, (groups, -1)) * scale[:, :, None]
    expected = round_inputs_reference(x, groups)
    assert (scale[2] == 1).all()
    different = (rounded.flatten(1) - expected).abs() > 1e-5
    assert different.sum() <= 2, "more than a few that lie between two numbers"


@pytest.mark.parametrize(("case", "m"), [("fp8 rows", 20), ("fp8 blocks", 3), ("fp8 blocks", 70)])
def test_product(monkeypatch: pytest.MonkeyPatch, case: str, m: int) -> None:
    torch.manual_seed(m)
    weight = random_packed(72, 512, **CASES[case])
    x, bias = torch.randn(m, 512, device=DEVICE).half(), torch.randn(72, device=DEVICE).half()
    dense, rounded = dequantize_reference(weight), round_inputs_reference(x, weight.scale.shape[1])
    for gated in (False, True):
        expected = linear_reference(rounded, dense, bias=bias, gated=gated)
        error = (fp8_linear(x, weight, bias, gated=gated).float() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE
    expected = linear_reference(rounded, dense, bias=bias)
    monkeypatch.setattr(fp8_inputs, "num_sms", lambda: 1 << 30)
    sums = fp8_split_k_linear(x, weight, bias)
    assert sums.shape[0] == 4 and (sums.sum(0) - expected).abs().max() / expected.abs().max() < TOLERANCE


COMPILE = """
from nanovllm.kernels.linear import fp8_inputs
from nanovllm.kernels.linear.packed import PackedWords

fp8_inputs.launch = compile
fp8_inputs._device_limits, fp8_inputs.num_sms = lambda: (132, 232_448), lambda: 132
words = torch.empty(512, 256, dtype=torch.int32)
blocks = PackedWords("fp8", 64, words, torch.empty(4, 8), 128, rounds_inputs=True)
rows = PackedWords("fp8", 64, words, torch.empty(512, 1), rounds_inputs=True)
fp8_inputs.fp8_linear(torch.empty(64, 1024, dtype=torch.bfloat16), blocks, gated=True, pdl=True)
fp8_inputs.fp8_linear(torch.empty(256, 1024, dtype=torch.bfloat16), rows, pdl=True)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    assert [(one.kernel, "wgmma" in one.instructions) for one in found] == [
        ("_round_inputs_kernel", False),
        ("_fp8_kernel", True),
    ] * 2
