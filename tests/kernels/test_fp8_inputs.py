"""Products of fp8 weights with inputs rounded to fp8, against the plain computation with the same rounding."""

import pytest
import torch

from nanovllm.checkpoint.packed.words import WordOrder, from_words
from nanovllm.kernels.elementwise.rms_norm import add_partial_sums_reference, rms_norm_reference
from nanovllm.kernels.linear import fp8_inputs
from nanovllm.kernels.linear.fp8_inputs import fp8_linear, fp8_split_k_linear, round_inputs, round_inputs_reference
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.linear.packed import dequantize_reference
from tests.kernels.packed_weights import CASES, random_packed
from tests.kernels.support import DEVICE

TOLERANCE = 4e-3


@pytest.mark.parametrize("groups", [1, 3])
def test_rounded_inputs(groups: int) -> None:
    torch.manual_seed(groups)
    x = torch.randn(5, 2, 384, device=DEVICE).half()[:, 1]
    x[2] = 0
    codes, scale = round_inputs(x, groups, 64)
    rounded = from_words(codes, WordOrder(8, 64)).float().unflatten(1, (groups, -1)) * scale.T[:, :, None]
    expected = round_inputs_reference(x, groups)
    assert (scale[:, 2] == 1).all()
    different = (rounded.flatten(1) - expected).abs() > 1e-5
    assert different.sum() <= 2, "more than a few that lie between two numbers"


def test_codes_of_more_rows() -> None:
    """Kernels read whole tiles; the rows after the last are zero, which takes less power than old numbers."""
    x = torch.randn(5, 384, device=DEVICE).half()
    more, scale = round_inputs(x, 1, 64, rows=8)
    codes, same = round_inputs(x, 1, 64)
    assert more.shape == (8, 384) and torch.equal(more[:5].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale, same) and not more[5:].view(torch.uint8).any()


@pytest.mark.parametrize(("groups", "splits"), [(1, 0), (1, 2), (3, 4)])
def test_norm_of_rounded_inputs(groups: int, splits: int) -> None:
    torch.manual_seed(splits)
    x, weight = torch.randn(5, 384, device=DEVICE).half(), torch.rand(384, device=DEVICE).half()
    sums = torch.randn(splits, 5, 384, device=DEVICE)
    added = add_partial_sums_reference(x, sums)
    norm = {"norm_weight": weight, "eps": 1e-6, "partial_sums": sums if splits else None}
    codes, scale = round_inputs(x, groups, 64, **norm)
    rounded = from_words(codes, WordOrder(8, 64)).float().unflatten(1, (groups, -1)) * scale.T[:, :, None]
    torch.testing.assert_close(x, added)  # in place
    expected = round_inputs_reference(rms_norm_reference(x, weight, 1e-6), groups)
    different = (rounded.flatten(1) - expected).abs() > 2e-3 * expected.abs() + 1e-5
    assert different.sum() <= 4, "more than a few that lie between two numbers"


@pytest.mark.parametrize(("case", "m"), [("fp8 rows", 20), ("fp8 blocks", 3), ("fp8 blocks", 33)])
def test_product(monkeypatch: pytest.MonkeyPatch, case: str, m: int) -> None:
    torch.manual_seed(m)
    weight = random_packed(40, 512, **CASES[case])
    x, bias = torch.randn(m, 512, device=DEVICE).half(), torch.randn(40, device=DEVICE).half()
    dense, rounded = dequantize_reference(weight), round_inputs_reference(x, weight.scale.shape[1])
    for gated in (False, True):
        expected = linear_reference(rounded, dense, bias=bias, gated=gated)
        error = (fp8_linear(x, weight, bias, gated=gated).float() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE
    expected = linear_reference(rounded, dense, bias=bias)
    monkeypatch.setattr(fp8_inputs, "num_sms", lambda: 1 << 30)
    sums = fp8_split_k_linear(x, weight, bias)
    assert sums.shape[0] == 4 and (sums.sum(0) - expected).abs().max() / expected.abs().max() < TOLERANCE
