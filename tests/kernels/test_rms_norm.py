"""The norm and the addition in front of it, against plain torch."""

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.rms_norm import (
    MANY_ROWS,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from tests.kernels.support import DEVICE

EPS = 1e-6
SHAPES = [(1, 64), (5, 80), (3, 576), (2, 8192)] + ([(MANY_ROWS + 3, 1024)] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # one rounding


def make(m: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(m + hidden)
    x, residual = (torch.randn(m, hidden, device=DEVICE) * 3).to(dtype), torch.randn(m, hidden, device=DEVICE).to(dtype)
    return x, residual, torch.randn(hidden, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "hidden"), SHAPES)
def test_norm(m: int, hidden: int, dtype: torch.dtype) -> None:
    x, _, weight = make(m, hidden, dtype)
    expected = rms_norm_reference(x, weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected, rtol=2 * TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "hidden"), SHAPES)
def test_addition_then_norm(m: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual, weight = make(m, hidden, dtype)
    summed = residual.clone()
    expected = add_rms_norm_reference(x, summed, weight, EPS)
    actual = add_rms_norm(x, residual, weight, EPS)
    if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts off where the GPU rounds
        torch.testing.assert_close(residual, summed, rtol=2**-7, atol=0)
        expected = rms_norm_reference(residual, weight, EPS)
    else:
        assert torch.equal(residual, summed)
    torch.testing.assert_close(actual, expected, rtol=2 * TOLERANCE[dtype], atol=1e-6)


def test_several_rows_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.kernels.rms_norm.MANY_ROWS", 1)
    x, residual, weight = make(70, 80, torch.float32)  # 32 rows a program: the last has six
    expected = rms_norm_reference(residual + x, weight, EPS)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, EPS), expected, rtol=1e-5, atol=1e-6)


def test_a_view_goes_in_and_out_is_used() -> None:
    wide, _, weight = make(6, 64, torch.float32)
    x, weight, out = wide[:, 16:32], weight[:16].contiguous(), torch.empty(6, 16, device=DEVICE)
    assert rms_norm(x, weight, EPS, out=out) is out
    torch.testing.assert_close(out, rms_norm_reference(x, weight, EPS), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter knows no dependent launch")
def test_dependent_launches() -> None:
    x, residual, weight = make(64, 1024, torch.bfloat16)
    expected = rms_norm_reference(x, weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS, pdl=True), expected, rtol=2**-7, atol=1e-6)
    expected = rms_norm_reference(residual + x, weight, EPS)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, EPS, pdl=True), expected, rtol=2**-7, atol=1e-6)
