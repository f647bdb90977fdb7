"""The linear layer for few rows against plain torch: every path, odd sizes, everything that folds in."""

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.linear import (
    MAX_ROWS,
    LinearConfig,
    fused_linear,
    fused_linear_reference,
    linear_config,
)
from tests.kernels.support import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EPS = 1e-6
GEMV = LinearConfig(1, 4, 128, slices=1, num_warps=1, num_stages=1)
SLICED = LinearConfig(16, 16, 16, slices=4, num_warps=4, num_stages=2)
NARROW = LinearConfig(16, 8, 16, slices=8, num_warps=8, num_stages=2)
ONE_STEP = LinearConfig(16, 16, 64, slices=4, num_warps=4, num_stages=1)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def check(actual: Tensor, expected: Tensor) -> None:
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert error < TOLERANCE[actual.dtype], error


def check_all_folds(m: int, n: int, k: int, dtype: torch.dtype, config: LinearConfig | None) -> None:
    """As the linears of a layer use it, and everything at once."""
    torch.manual_seed(m + n + k)
    x = random(m, k, dtype=dtype, scale=3.0)
    weight, bias = random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)
    norm_weight = random(k, dtype=dtype) + 1
    for norm, gated, add, with_bias in [(1, 0, 0, 1), (0, 0, 1, 0), (1, 1, 1, 1)]:
        residual = random(m, n // 2 if gated else n, dtype=dtype) if add else None
        options = dict(
            bias=bias if with_bias else None, norm_weight=norm_weight if norm else None, eps=EPS, gated=bool(gated)
        )
        expected = fused_linear_reference(x, weight, residual=residual, **options)
        actual = fused_linear(x, weight, residual=residual, config=config, **options)
        check(actual, expected)
        if residual is not None:
            assert actual is residual


@pytest.mark.parametrize(
    ("m", "dtype"),
    [(1, torch.float32), (7, torch.float32), (3, torch.float16)] + [(m, torch.bfloat16) for m in (1, 2, MAX_ROWS)],
)
def test_own_choice_of_config(m: int, dtype: torch.dtype) -> None:
    check_all_folds(m, 40, 144, dtype, None)


@pytest.mark.parametrize(
    ("m", "config"),
    [(1, GEMV), (1, SLICED), (16, SLICED), (5, NARROW), (16, ONE_STEP)],
)
@pytest.mark.parametrize(("n", "k"), [(48, 256), (24, 200)])
def test_each_config(m: int, n: int, k: int, config: LinearConfig) -> None:
    check_all_folds(m, n, k, torch.bfloat16, config)


@pytest.mark.parametrize("config", [GEMV, ONE_STEP])
def test_out_leaves_the_residual_alone_and_x_may_be_a_view(config: LinearConfig) -> None:
    rows = config.block_m
    x = random(rows, 2, 64, dtype=torch.float32)[:, 1]
    weight, residual = random(24, 64, dtype=torch.float32), random(rows, 24, dtype=torch.float32)
    before, out = residual.clone(), torch.empty_like(residual)
    result = fused_linear(x, weight, residual=residual, out=out, config=config)
    assert result is out and torch.equal(residual, before)
    check(out, fused_linear_reference(x, weight, residual=residual))


@pytest.mark.parametrize("config", [SLICED, ONE_STEP])
def test_rows_past_the_end_are_not_written(config: LinearConfig) -> None:
    x, weight = random(5, 64, dtype=torch.bfloat16), random(24, 64, dtype=torch.bfloat16)
    buffer = torch.full((16, 24), 7.0, dtype=torch.bfloat16, device=DEVICE)
    fused_linear(x, weight, out=buffer[:5], config=config)
    assert buffer[5:].eq(7.0).all()
    check(buffer[:5], fused_linear_reference(x, weight))


@pytest.mark.parametrize("m", [1, 2, MAX_ROWS])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 1024), (1024, 2048), (2048, 2048), (24576, 4096), (151936, 4096), (48, 80)]
)
def test_configs_suit_their_sizes(m: int, n: int, k: int) -> None:
    config = linear_config(m, n, k, dtype=torch.bfloat16, num_sms=132)
    assert config.block_m >= m
    assert n // config.block_n >= 64 or config.block_n <= 8  # a chip's worth of programs, unless the weight is tiny


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter is too slow for real sizes")
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize(("n", "k", "gated"), [(4096, 1024, False), (1024, 3072, False), (6144, 1024, True)])
def test_real_sizes(m: int, n: int, k: int, gated: bool, pdl: bool) -> None:
    x, weight = random(m, k, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    options = dict(norm_weight=random(k, dtype=torch.bfloat16) + 1, eps=EPS, gated=gated)
    check(fused_linear(x, weight, pdl=pdl, **options), fused_linear_reference(x, weight, **options))
