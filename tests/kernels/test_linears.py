"""The linears for one row and for few rows against plain torch: odd sizes, and everything that folds in."""

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.few_rows_linear import MAX_ROWS, few_rows_linear, few_rows_linear_reference
from nanovllm.kernels.one_row_linear import one_row_linear, one_row_linear_reference
from tests.kernels.support import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EPS = 1e-6
SIZES = [(40, 144), (48, 512), (24, 200), (2, 8)]  # (N, K)
if DEVICE == "cuda":
    SIZES += [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288)]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def check(actual: Tensor, expected: Tensor) -> None:
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert error < TOLERANCE[actual.dtype], error


@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_row(dtype: torch.dtype, n: int, k: int, pdl: bool) -> None:
    torch.manual_seed(n + k)
    x, norm_weight = random(1, k, dtype=dtype, scale=3.0), random(k, dtype=dtype) + 1
    weight, bias = random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)
    for norm, gated, add, with_bias in [(1, 0, 0, 1), (0, 0, 1, 0), (1, 1, 1, 1), (0, 1, 0, 0)]:
        residual = random(1, n // 2 if gated else n, dtype=dtype) if add else None
        options = dict(
            bias=bias if with_bias else None, norm_weight=norm_weight if norm else None, eps=EPS, gated=bool(gated)
        )
        expected = one_row_linear_reference(x, weight, residual=residual, **options)
        actual = one_row_linear(x, weight, residual=residual, pdl=pdl, **options)
        check(actual, expected)
        assert residual is None or actual is residual


@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("m", [1, 5, MAX_ROWS])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_few_rows(dtype: torch.dtype, n: int, k: int, m: int, pdl: bool) -> None:
    torch.manual_seed(m + n + k)
    x = random(m, 2, k, dtype=dtype, scale=3.0)[:, 1]  # a row may be part of a wider one
    weight = random(n, k, dtype=dtype, scale=k**-0.5)
    buffer = random(MAX_ROWS + 1, n, dtype=dtype)
    for bias in (None, random(n, dtype=dtype)):
        before, residual = buffer.clone(), buffer[:m]
        expected = few_rows_linear_reference(x, weight, bias, residual)
        assert few_rows_linear(x, weight, bias, residual, pdl=pdl) is residual
        check(residual, expected)
        assert torch.equal(buffer[m:], before[m:]), "a row past the end was written"
