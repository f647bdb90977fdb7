"""A linear on a GPU gives the same numbers whichever of its kernels serves so many rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.distributed.group import ALONE
from nanovllm.layers.cuda_linear import LARGE_HIDDEN, NARROW_HIDDEN, WIDE_HIDDEN, CudaLinear, InvariantLinear
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.residual import Residual
from tests.kernels.support import DEVICE

OUT = 20
ROWS = [1, 2, 16, 17, 33, 65, 129, 257]  # at the edges of what each kernel takes
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


def check(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert actual.shape == expected.shape and error < TOLERANCE[actual.dtype], error


def case(kind: type[Linear], num_rows: int, hidden: int, dtype: torch.dtype) -> tuple[Linear, RMSNorm, Tensor]:
    torch.manual_seed(num_rows + hidden)
    linear = kind(hidden, OUT, bias=True, dtype=dtype, device=torch.device(DEVICE))
    linear.weight.normal_(std=hidden**-0.5)
    linear.bias.normal_()
    norm = RMSNorm(hidden, eps=1e-6, dtype=dtype, device=torch.device(DEVICE))
    norm.weight.uniform_(0.5, 1.5)
    norm.finish_loading()
    return linear, norm, torch.randn(num_rows, hidden, device=DEVICE).to(dtype)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("hidden", [96, NARROW_HIDDEN + 16, LARGE_HIDDEN + 16, WIDE_HIDDEN])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_number_of_rows(dtype: torch.dtype, hidden: int, num_rows: int) -> None:
    linear, norm, x = case(CudaLinear, num_rows, hidden, dtype)
    weight, bias = linear.weight.double(), linear.bias.double()
    normed = F.rms_norm(x.double(), (hidden,), norm.weight.double(), 1e-6)
    check(linear(x), F.linear(x.double(), weight, bias))
    check(linear.after_norm(norm, Residual(x)), F.linear(normed, weight, bias))
    gate, up = F.linear(normed, weight, bias).chunk(2, dim=-1)
    check(linear.gated_after_norm(norm, Residual(x)), F.silu(gate) * up)
    residual = torch.randn(num_rows, OUT, device=DEVICE).to(dtype)
    expected = residual.double() + F.linear(x.double(), weight, bias)
    check(linear.add_to(residual.clone(), x), expected)
    stream = Residual(residual.clone())
    stream.add(linear, x, ALONE)
    after = RMSNorm(OUT, eps=1e-6, dtype=dtype, device=torch.device(DEVICE))
    check(stream.normed(after), F.rms_norm(expected, (OUT,), eps=1e-6))
    check(stream.rows, expected)


def test_parts_are_added_once_whoever_asks() -> None:
    linear, norm, x = case(CudaLinear, 40, 20, torch.float16)
    assert linear.in_parts(x) is not None
    step = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    rows = torch.randn(40, OUT, device=DEVICE).half()
    expected = rows.double() + 2 * step
    stream = Residual(rows)
    stream.add(linear, x, ALONE)
    stream.add(linear, x, ALONE)
    for _ in range(2):
        check(stream.rows, expected)
    stream.add(linear, x, ALONE)
    for _ in range(2):
        check(stream.normed(norm), F.rms_norm(expected + step, (OUT,), norm.weight.double(), 1e-6))


@pytest.mark.parametrize(
    ("num_outputs", "rows"),
    [(64, {17, 256}), (NARROW_HIDDEN, {17, 256}), (LARGE_HIDDEN, {17, 128}), (2560, {17, 32}), (WIDE_HIDDEN, {2, 32})],
)
def test_which_rows_come_in_parts(num_outputs: int, rows: set[int]) -> None:
    linear = CudaLinear(32, num_outputs, bias=False, dtype=torch.float16, device=torch.device(DEVICE))
    linear.weight.zero_()
    x = torch.zeros(300, 32, device=DEVICE).half()
    edges = {1, 2, 16, 17, 32, 33, 128, 129, 256, 257}
    in_parts = {n for n in edges if linear.in_parts(x[:n]) is not None}
    assert (min(in_parts), max(in_parts)) == (min(rows), max(rows))


def test_an_invariant_row_does_not_depend_on_the_others() -> None:
    linear, norm, x = case(InvariantLinear, 5, 96, torch.float32)
    for method in (linear.after_norm, linear.gated_after_norm):
        assert torch.equal(method(norm, Residual(x))[:1], method(norm, Residual(x[:1])))
