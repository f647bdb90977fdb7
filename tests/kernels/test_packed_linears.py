"""Linears with packed weights: every kernel that takes them against the plain computation on the unpacked weight."""

import itertools

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.linear import packed_tiled
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.linear.packed import dequantize_reference
from nanovllm.kernels.linear.packed_dequantize import packed_dequantize
from nanovllm.kernels.linear.packed_rows import MAX_ROWS, RowTile, packed_rows_linear
from nanovllm.kernels.linear.packed_tiled import packed_deterministic, packed_split_k_linear, packed_tiled_linear
from tests.kernels.packed_weights import CASES, WIDE, random_packed
from tests.kernels.support import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EPS = 1e-6
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter truncates where it rounds to bfloat16
PDL = [False, pytest.param(True, marks=pytest.mark.gpu)]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(actual: Tensor, expected: Tensor, times: int = 1) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < times * TOLERANCE[actual.dtype], error


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize(("case", "m"), list(zip(WIDE, itertools.cycle([1, MAX_ROWS, 3]))))
def test_few_rows(case: str, m: int, pdl: bool) -> None:
    torch.manual_seed(m)
    n, k, dtype = 24, 256, torch.bfloat16 if m == 3 else torch.float16
    weight = random_packed(n, k, **CASES[case])
    x = random(m, 2, k, dtype=dtype)[:, 1] * 3  # a row may be part of a wider one
    norm_weight, bias = random(k, dtype=dtype) + 1, random(n, dtype=dtype)
    dense = dequantize_reference(weight)
    for norm, gated, add, with_bias in [(1, 1, 0, 0), (0, 0, 1, 1)]:
        buffer = random(m + 1, n // 2 if gated else n, dtype=dtype)
        before, residual = buffer.clone(), buffer[:m] if add else None
        options = dict(
            bias=bias if with_bias else None,
            norm_weight=norm_weight if norm else None,
            eps=EPS,
            residual=residual,
            gated=bool(gated),
        )
        expected = linear_reference(x, dense, **options)
        actual = packed_rows_linear(x, weight, pdl=pdl, **options)
        check(actual, expected, 2 if norm else 1)  # with the norm's weight fused, x is rounded once more
        assert residual is None or actual is residual
        assert torch.equal(buffer[m:], before[m:]), "a row past the end was written"


@pytest.mark.parametrize("tile", [RowTile(1, 1, 2), RowTile(1, 4, 4), RowTile(3, 2, 1)])
@pytest.mark.parametrize("spans", [1, 7])
def test_few_rows_of_any_width(spans: int, tile: RowTile) -> None:
    """Fewer spans than warps, more than are loaded ahead, and an incomplete last step."""
    torch.manual_seed(spans)
    weight, x = random_packed(24, 256 * spans, **CASES["int4 zero"]), random(3, 256 * spans, dtype=torch.float16)
    check(packed_rows_linear(x, weight, tile=tile), linear_reference(x, dequantize_reference(weight)))


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("case", CASES)
def test_unpacked(case: str, pdl: bool) -> None:
    torch.manual_seed(0)
    weight = random_packed(22, 256, **CASES[case])
    expected = dequantize_reference(weight)
    torch.testing.assert_close(packed_dequantize(weight, torch.float32, pdl=pdl), expected, rtol=1e-6, atol=1e-6)
    check(packed_dequantize(weight, torch.bfloat16, pdl=pdl), expected.bfloat16())


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize(("case", "m"), list(zip(CASES, itertools.cycle([2, 17, 33, 65, 129]))))
def test_tiles(monkeypatch: pytest.MonkeyPatch, case: str, m: int, pdl: bool) -> None:
    torch.manual_seed(m)
    n, k, dtype = 40, 256, HALF
    weight, x, bias = random_packed(n, k, **CASES[case]), random(m, 2, k, dtype=dtype)[:, 1], random(n, dtype=dtype)
    dense = dequantize_reference(weight)
    for gated in (False, True) if m == 17 else (m > 33,):
        check(
            packed_tiled_linear(x, weight, bias, gated=gated, pdl=pdl),
            linear_reference(x, dense, bias=bias, gated=gated),
        )
    expected = linear_reference(x.float(), dense, bias=bias.float())
    for num_sms in (1, 1 << 30):  # no split, and as many as there can be
        monkeypatch.setattr(packed_tiled, "num_sms", lambda sms=num_sms: sms)
        sums = packed_split_k_linear(x, weight, bias, pdl=pdl)
        assert sums.shape[0] == (1 if num_sms == 1 else min(4, k // (weight.distance * weight.num_pairs)))
        check(sums.sum(0).to(dtype), expected.to(dtype))


@pytest.mark.parametrize("case", ["int4 zero", "fp8 blocks", "mxfp4"])
def test_deterministic(case: str) -> None:
    """A row's bits do not depend on the number of rows."""
    torch.manual_seed(0)
    weight, x = random_packed(40, 256, **CASES[case]), random(70, 256, dtype=HALF)
    together = packed_deterministic(x, weight)
    check(together, linear_reference(x, dequantize_reference(weight)))
    for row in (0, 65):
        assert torch.equal(packed_deterministic(x[row : row + 1], weight), together[row : row + 1])
