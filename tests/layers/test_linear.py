"""A linear gives the same numbers for any number of rows and with every kernel."""

import pytest
import torch

from nanovllm.layers.residual import Residual
from nanovllm.weights.dense import cpu_has_bfloat16
from tests.layers.build import context, make_linear

DTYPES = [torch.float32, torch.bfloat16] if cpu_has_bfloat16() else [torch.float32]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 64, 65])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_plain_product(dtype: torch.dtype, num_rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    linear = make_linear(48, 80, context(dtype), bias=bias)
    weight = linear.weight.tensor.normal_(generator=generator).double()
    if linear.bias is not None:
        linear.bias.normal_(generator=generator)
    x, residual = torch.randn(num_rows, 48, generator=generator), torch.randn(num_rows, 80, generator=generator)
    expected = x.to(dtype).double() @ weight.T + (0 if linear.bias is None else linear.bias.double())
    linear.finish_loading()
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.2, "rtol": 2e-2}
    torch.testing.assert_close(linear(x.to(dtype)).double(), expected, **tolerance)
    added = linear(x.to(dtype), add_to=Residual(residual.to(dtype))).rows
    torch.testing.assert_close(added.double(), expected + residual.to(dtype).double(), **tolerance)
