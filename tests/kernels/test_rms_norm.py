"""The norm against plain torch."""

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.elementwise.rms_norm import (
    add_partial_sums,
    add_partial_sums_reference,
    add_rms_norm,
    rms_norm,
    rms_norm_reference,
)
from tests.kernels.support import DEVICE

EPS = 1e-6
SHAPES = [(1, 64), (5, 80), (3, 576), (2, 8192)] + ([(2000, 1024)] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # one rounding


def make(m: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(m + hidden)
    return (torch.randn(m, hidden, device=DEVICE) * 3).to(dtype), torch.randn(hidden, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "hidden"), SHAPES)
def test_equals_torch(m: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = make(m, hidden, dtype)
    expected = rms_norm_reference(x, weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected, rtol=2 * TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("num_splits", [1, 2, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "hidden"), SHAPES)
def test_partial_sums_are_added_first(m: int, hidden: int, dtype: torch.dtype, num_splits: int) -> None:
    x, weight = make(m, hidden, dtype)
    partial_sums = torch.randn(num_splits, m, hidden, device=DEVICE)
    total = add_partial_sums_reference(x, partial_sums)
    alone, options = x.clone(), dict(rtol=2 * TOLERANCE[dtype], atol=1e-6)
    add_partial_sums(alone, partial_sums)
    torch.testing.assert_close(alone, total, **options)
    normed = add_rms_norm(x, partial_sums, weight, EPS)
    assert torch.equal(x, alone)
    torch.testing.assert_close(normed, rms_norm_reference(x, weight, EPS), **options)


def test_a_view_goes_in() -> None:
    wide, weight = make(6, 64, torch.float32)
    x, weight = wide[:, 16:32], weight[:16].contiguous()
    torch.testing.assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter knows no dependent launch")
def test_dependent_launch() -> None:
    x, weight = make(64, 1024, torch.bfloat16)
    expected = rms_norm_reference(x, weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS, pdl=True), expected, rtol=2**-7, atol=1e-6)
