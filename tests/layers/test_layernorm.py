"""The norm gives the same numbers with every kernel: few or many rows, 16 or 32 bits."""

import pytest
import torch

from nanovllm.layers.layernorm import FEW_ROWS
from tests.layers.build import context, make_norm


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])  # with the smallest, eps matters
@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_definition(dtype: torch.dtype, num_rows: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    norm = make_norm(48, context(dtype))
    norm.weight.uniform_(0.5, 1.5, generator=generator)
    norm.finish_loading()
    x = (torch.randn(num_rows, 48, generator=generator) * scale + scale / 2).to(dtype)  # RMS norm keeps the mean
    exact = x.double()
    expected = exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2e-2}
    torch.testing.assert_close(norm(x).double(), expected, **tolerance)
