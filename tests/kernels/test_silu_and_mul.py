"""The MLP's gate against plain torch."""

import pytest
import torch

from nanovllm.kernels.elementwise.silu_and_mul import MANY_ROWS, silu_and_mul, silu_and_mul_reference
from tests.kernels.support import DEVICE

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "n"), [(1, 8), (3, 1024), (5, 1544), (MANY_ROWS + 1, 40)])
def test_against_torch(m: int, n: int, dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and m > MANY_ROWS and dtype != torch.float32:
        m = 6  # the interpreter runs one program after the other
    torch.manual_seed(m)
    gate_up = (torch.randn(m, 2 * n, device=DEVICE) * 3).to(dtype)
    torch.testing.assert_close(silu_and_mul(gate_up), silu_and_mul_reference(gate_up), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * 1544, device=DEVICE) * 2).to(dtype)
    expected = silu_and_mul_reference(gate_up, gelu=True)
    torch.testing.assert_close(silu_and_mul(gate_up, gelu=True), expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_out_is_used() -> None:
    gate_up, out = torch.randn(2, 32, device=DEVICE), torch.empty(2, 16, device=DEVICE)
    assert silu_and_mul(gate_up, out=out) is out
    torch.testing.assert_close(out, silu_and_mul_reference(gate_up), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter knows no dependent launch")
def test_dependent_launch() -> None:
    gate_up = torch.randn(64, 6144, device=DEVICE, dtype=torch.bfloat16)
    expected = silu_and_mul_reference(gate_up)
    torch.testing.assert_close(silu_and_mul(gate_up, pdl=True), expected, rtol=2**-7, atol=1e-6)
