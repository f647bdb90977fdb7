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


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS + 1])
def test_a_weight_with_an_offset_is_float32_in_a_16_bit_model(num_rows: int) -> None:
    norm = make_norm(48, context(torch.bfloat16), offset=1.0)
    norm.weight.uniform_(1.0, 1.01)  # which bfloat16 would round to one of three numbers
    norm.finish_loading()
    x = torch.randn(num_rows, 48).bfloat16()
    expected = torch.nn.functional.rms_norm(x.float(), (48,), norm.weight, 1e-6).bfloat16()
    assert not norm.fuses and norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), expected, atol=0, rtol=2**-8)  # rounded once
