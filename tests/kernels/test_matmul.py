"""The deterministic product: equal to plain torch, and the same bits for a row in any batch."""

import pytest
import torch

from nanovllm.kernels.linear.matmul import matmul, matmul_reference
from tests.kernels.support import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (3, 80, 136), (65, 48, 128), (130, 136, 72)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_torch(m: int, n: int, k: int, dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(m)
    x = torch.randn(m, 2, k, device=DEVICE).to(dtype)[:, 1]  # rows of a wider tensor
    weight = torch.randn(n, k, device=DEVICE).to(dtype)
    bias = torch.randn(n, device=DEVICE).to(dtype) if with_bias else None
    expected = matmul_reference(x, weight, bias).float()
    error = (matmul(x, weight, bias).float() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, k, most = (1032, 2080, 5000) if DEVICE == "cuda" else (40, 160, 200)
    x, weight = torch.randn(most, k, device=DEVICE).to(dtype), torch.randn(n, k, device=DEVICE).to(dtype)
    together = matmul(x, weight)
    for m in (1, 3, 64, 200):
        assert torch.equal(matmul(x[:m], weight), together[:m])
        assert torch.equal(matmul(x[-m:], weight), together[-m:])
