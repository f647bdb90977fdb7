"""The linears for one row and few rows and the gates against plain torch: odd sizes, and everything fused into them."""

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.linear import few_rows as few_rows_linear
from nanovllm.kernels.linear import tiled as tiled_linear
from nanovllm.kernels.linear.one_row import linear_reference, one_row_linear
from tests.kernels.support import DEVICE, with_halves

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EPS = 1e-6
SIZES = [(40, 144), (48, 512), (24, 200), (2, 8)]  # (N, K)
if DEVICE == "cuda":
    SIZES += [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288)]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def check(actual: Tensor, expected: Tensor, times: int = 1) -> None:
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert error < times * TOLERANCE[actual.dtype], error


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
        expected = linear_reference(x, weight, residual=residual, **options)
        actual = one_row_linear(x, weight, residual=residual, pdl=pdl, **options)
        check(actual, expected)
        assert residual is None or actual is residual


def few_rows_case(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(m + n + k)
    x = random(m, 2, k, dtype=dtype, scale=3.0)[:, 1]  # a row may be part of a wider one
    return x, random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)


@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "m"), with_halves([2, 5, 8, 9, few_rows_linear.MAX_ROWS]))
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_few_rows(dtype: torch.dtype, n: int, k: int, m: int, pdl: bool) -> None:
    x, weight, bias = few_rows_case(m, n, k, dtype)
    norm_weight = random(k, dtype=dtype) + 1
    cases = [(0, 0, 1, 1), (1, 1, 0, 0), (0, 0, 0, 0), (1, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 0)]
    for norm, gated, add, with_bias in cases[:2] if pdl else cases:
        buffer = random(m + 1, n // 2 if gated else n, dtype=dtype)
        before, residual = buffer.clone(), buffer[:m] if add else None
        options = dict(
            bias=bias if with_bias else None,
            norm_weight=norm_weight if norm else None,
            eps=EPS,
            residual=residual,
            gated=bool(gated),
        )
        expected = linear_reference(x, weight, **options)
        actual = few_rows_linear.few_rows_linear(x, weight, pdl=pdl, **options)
        check(actual, expected, 2 if norm else 1)  # with the norm's weight fused, x is rounded once more
        assert residual is None or actual is residual
        assert torch.equal(buffer[m:], before[m:]), "a row past the end was written"


@pytest.mark.parametrize("name", ["MANY_OUTPUTS", "FEW_OUTPUTS", "LONG_ROWS"])
@pytest.mark.parametrize("k", [8, 104, 512, 1024, 1104, 1536, 2048, 3000])
def test_few_rows_read_ahead_of_any_width(monkeypatch: pytest.MonkeyPatch, name: str, k: int) -> None:
    """Fewer steps than are prefetched, as many, more, and an incomplete last one."""
    monkeypatch.setattr(few_rows_linear, "_tiles", lambda *_: getattr(few_rows_linear, name))
    x, weight, bias = few_rows_case(3, 20, k, torch.bfloat16)
    for gated in (False, True):
        options = dict(bias=bias, norm_weight=random(k, dtype=torch.bfloat16) + 1, eps=EPS, gated=gated)
        actual = few_rows_linear.few_rows_linear(x, weight, **options)
        check(actual, linear_reference(x, weight, **options), 2)


@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "m"), with_halves([2, 16, 17, 32, 33, 64, 65, 128, 129, tiled_linear.MAX_ROWS]))
@pytest.mark.parametrize(("n", "k"), [*SIZES, (134, 128)])
def test_tiles(dtype: torch.dtype, n: int, k: int, m: int, pdl: bool) -> None:
    x, weight, bias = few_rows_case(m, n, k, dtype)
    for gated, with_bias in [(1, 1)] if pdl else [(0, 1), (0, 0), (1, 1), (1, 0)]:
        options = dict(bias=bias if with_bias else None, gated=bool(gated))
        expected = linear_reference(x, weight, **options)
        check(tiled_linear.tiled_linear(x, weight, pdl=pdl, **options), expected)


@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "m"), with_halves([2, 17, 33, 65, 129, tiled_linear.MAX_ROWS]))
@pytest.mark.parametrize(("n", "k"), [*SIZES, (134, 128)])
def test_parts_add_up(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int, k: int, m: int, pdl: bool) -> None:
    x, weight, bias = few_rows_case(m, n, k, dtype)
    expected = linear_reference(x.float(), weight.float(), bias=bias.float())
    seen = set()
    for num_sms in (1, 2 * 3 * 9, 1 << 30):  # as many programs as fit, so as many splits
        monkeypatch.setattr(tiled_linear, "_device_limits", lambda sms=num_sms: (sms, 200_000))
        partial_sums = tiled_linear.split_k_linear(x, weight, bias, pdl=pdl)
        seen.add(len(partial_sums))
        assert partial_sums.shape[1:] == (m, n) and partial_sums.dtype == torch.float32
        torch.testing.assert_close(partial_sums.sum(0), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert seen >= {1, min(tiled_linear.MAX_SPLITS, _splits_at_most(k))}


def _splits_at_most(k: int) -> int:
    return max(splits for splits in (1, 2, 4) if splits == 1 or splits * 128 <= k)
