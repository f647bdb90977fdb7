"""A linear on a GPU gives the same numbers with every kernel that it may choose."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.distributed.group import ALONE
from nanovllm.layers import cuda_linear
from nanovllm.layers.cuda_linear import NARROW_HIDDEN, WIDE_HIDDEN, CudaLinear, DeterministicLinear
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.residual import Residual
from tests.kernels.support import DEVICE

OUT = 20
ROWS = [1, 2, 9, 16, 17, 33, 65, 129, 257]  # the limits of each kernel
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
@pytest.mark.parametrize("hidden", [96, 100, NARROW_HIDDEN + 16, WIDE_HIDDEN, WIDE_HIDDEN + 16])
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
    assert linear.split_k(x) is not None
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
    ("inputs", "outputs", "rows", "kernels"),
    [  # of Qwen3's 0.6B, 1.7B and 8B: what qkv, what o or down is served by
        (1024, 4096, 1, ["one"]),
        (1024, 4096, 2, ["few", "few"]),
        (1024, 4096, 16, ["few", "few"]),
        (1024, 4096, 17, ["cublas", "split_k"]),
        (1024, 4096, 33, ["tiles", "split_k"]),
        (1024, 4096, 256, ["tiles", "cublas"]),
        (1024, 4096, 257, ["cublas", "cublas"]),
        (3072, 1024, 16, ["few", "few"]),
        (3072, 1024, 256, ["cublas", "split_k"]),
        (2048, 4096, 16, ["few", "few"]),
        (6144, 2048, 16, ["cublas", "split_k"]),
        (6144, 2048, 129, ["cublas", "cublas"]),
        (4096, 6144, 2, ["tiles", "split_k"]),
        (4096, 6144, 64, ["tiles", "split_k"]),
        (4096, 6144, 65, ["cublas", "cublas"]),
        (1024, 151936, 2, ["cublas"]),
    ],
)
def test_which_kernel_serves(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, rows: int, kernels: list[str]
) -> None:
    used = []
    for name in ("one_row_linear", "few_rows_linear", "tiled_linear", "split_k_linear"):
        short = {"one_row_linear": "one", "few_rows_linear": "few", "tiled_linear": "tiles"}.get(name, "split_k")

        def kernel(x: Tensor, weight: Tensor, *_: object, short: str = short, **__: object) -> Tensor:
            used.append(short)
            return x.new_empty(x.shape[0], weight.shape[0])

        monkeypatch.setattr(cuda_linear, name, kernel)
    linear = CudaLinear(inputs, outputs, bias=False, dtype=torch.bfloat16, device=torch.device("meta"))
    x = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
    for run in (lambda: linear(x), lambda: Residual(x.new_empty(rows, outputs)).add(linear, x, ALONE))[: len(kernels)]:
        before = len(used)
        run()
        used += ["cublas"] * (len(used) == before)
    assert used == kernels


def test_a_deterministic_row_does_not_depend_on_the_others() -> None:
    linear, norm, x = case(DeterministicLinear, 5, 96, torch.float32)
    for method in (linear.after_norm, linear.gated_after_norm):
        assert torch.equal(method(norm, Residual(x))[:1], method(norm, Residual(x[:1])))
