"""A linear gives the same numbers for any number of rows and with every kernel."""

import pytest
import torch

from nanovllm.layers.linear import Linear, cpu_has_bfloat16

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16] if cpu_has_bfloat16() else [torch.float32]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 64, 65])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_plain_product(dtype: torch.dtype, num_rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    linear = Linear(48, 80, bias=bias, dtype=dtype, device=CPU)
    linear.weight.normal_(generator=generator)
    if linear.bias is not None:
        linear.bias.normal_(generator=generator)
    x, residual = torch.randn(num_rows, 48, generator=generator), torch.randn(num_rows, 80, generator=generator)
    expected = x.to(dtype).double() @ linear.weight.double().T + (0 if linear.bias is None else linear.bias.double())
    linear.finish_loading()
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.2, "rtol": 2e-2}
    torch.testing.assert_close(linear(x.to(dtype)).double(), expected, **tolerance)
    added = linear.add_to(residual.to(dtype), x.to(dtype))
    torch.testing.assert_close(added.double(), expected + residual.to(dtype).double(), **tolerance)
