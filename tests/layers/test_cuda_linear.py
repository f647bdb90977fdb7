"""A linear on a GPU gives the same numbers whichever of its kernels runs, in every weight format."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.stored import Part
from nanovllm.kernels.select import NARROW_INPUTS, WIDE_INPUTS
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.residual import Residual
from nanovllm.layers.split_k_residual import SplitKResidual
from nanovllm.weights.formats import weight_formats
from nanovllm.weights.int8 import Int8Weight
from tests.kernels.support import DEVICE
from tests.layers.build import context, make_linear, make_norm

OUT = 20
SIZES = [96, 100, NARROW_INPUTS + 16, WIDE_INPUTS, WIDE_INPUTS + 16]  # of the inputs, at the bounds of the table
ROWS = [1, 2, 9, 16, 17, 33, 65, 129, 257]  # at the edges of what each kernel takes
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


class Held:
    """A checkpoint tensor that is in memory already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)

    def read(self, part: Part = ()) -> Tensor:
        return self._tensor[part]


def check(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert actual.shape == expected.shape and error < TOLERANCE[actual.dtype], error


def case(
    num_rows: int, hidden: int, dtype: torch.dtype, *, deterministic: bool = False, quantization: str | None = None
) -> tuple[Linear, RMSNorm, Tensor]:
    torch.manual_seed(num_rows + hidden)
    device = torch.device(DEVICE)
    formats = weight_formats(quantization)
    built_with = context(dtype, device, kernels=True, deterministic=deterministic, weight_formats=formats)
    linear = make_linear(hidden, OUT, built_with, bias=True)
    weight = torch.empty(OUT, hidden, dtype=dtype, device=device).normal_(std=hidden**-0.5)
    linear.slots()["linear.weight"].load(Held(weight))
    linear.bias.normal_()
    norm = make_norm(hidden, built_with)
    norm.weight.uniform_(0.5, 1.5)
    norm.finish_loading()
    return linear, norm, torch.randn(num_rows, hidden, device=device).to(dtype)


def plain_weight(linear: Linear) -> Tensor:
    """In float64, as the format's definition has it."""
    if isinstance(linear.weight, Int8Weight):
        return linear.weight.tensor.double() * linear.weight.scale.double()[:, None]
    return linear.weight.tensor.double()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("quantization", "hidden"), [(None, size) for size in SIZES] + [("int8", 100)])
def test_every_number_of_rows(quantization: str | None, dtype: torch.dtype, hidden: int, num_rows: int) -> None:
    linear, norm, x = case(num_rows, hidden, dtype, quantization=quantization)
    weight, bias = plain_weight(linear), linear.bias.double()
    normed = F.rms_norm(x.double(), (hidden,), norm.weight.double(), 1e-6)
    check(linear(x), F.linear(x.double(), weight, bias))
    check(linear(Residual(x), norm=norm), F.linear(normed, weight, bias))
    gate, up = F.linear(normed, weight, bias).chunk(2, dim=-1)
    check(linear(Residual(x), norm=norm, activation="silu"), F.silu(gate) * up)
    residual = torch.randn(num_rows, OUT, device=DEVICE).to(dtype)
    expected = residual.double() + F.linear(x.double(), weight, bias)
    check(linear(x, add_to=SplitKResidual(residual.clone())).rows, expected)
    stream = linear(x, add_to=SplitKResidual(residual.clone()))
    after = make_norm(OUT, context(dtype, torch.device(DEVICE), kernels=True))
    check(stream.normed(after), F.rms_norm(expected, (OUT,), eps=1e-6))
    check(stream.rows, expected)


@pytest.mark.parametrize("num_rows", [1, 9, 40, 257])
def test_what_few_kernels_fuse(num_rows: int) -> None:
    """A GELU gate, and a norm whose weight is float32, which the kernel for one row computes. For others they are
    computed around the kernel."""
    linear, _, x = case(num_rows, 96, torch.float16)
    norm = make_norm(96, context(torch.float16, torch.device(DEVICE), kernels=True), offset=1.0)
    norm.weight.uniform_(0.5, 1.5)
    normed = F.rms_norm(x.double(), (96,), norm.weight.double(), 1e-6)
    gate, up = F.linear(normed, plain_weight(linear), linear.bias.double()).chunk(2, dim=-1)
    check(linear(Residual(x), norm=norm, activation="gelu"), F.gelu(gate, approximate="tanh") * up)
    check(linear(SplitKResidual(x), norm=norm, activation="silu"), F.silu(gate) * up)


def test_partial_sums_are_added_once() -> None:
    linear, norm, x = case(40, 20, torch.float16)
    step = F.linear(x.double(), linear.weight.tensor.double(), linear.bias.double())
    rows = torch.randn(40, OUT, device=DEVICE).half()
    expected = rows.double() + 2 * step
    stream = linear(x, add_to=SplitKResidual(rows))
    assert stream._partial_sums is not None
    stream = linear(x, add_to=stream)
    for _ in range(2):
        check(stream.rows, expected)
    stream = linear(x, add_to=stream)
    for _ in range(2):
        check(stream.normed(norm), F.rms_norm(expected + step, (OUT,), norm.weight.double(), 1e-6))


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows", "kernels"),
    [  # of Qwen3's 0.6B, 1.7B and 8B: what qkv, what o or down is served by
        (1024, 4096, 1, ["one_row"]),
        (1024, 4096, 2, ["few_rows", "few_rows"]),
        (1024, 4096, 16, ["few_rows", "few_rows"]),
        (1024, 4096, 17, ["cublas", "split_k"]),
        (1024, 4096, 33, ["tiled", "split_k"]),
        (1024, 4096, 256, ["tiled", "cublas"]),
        (1024, 4096, 257, ["cublas", "cublas"]),
        (3072, 1024, 16, ["few_rows", "few_rows"]),
        (3072, 1024, 256, ["cublas", "split_k"]),
        (2048, 4096, 16, ["few_rows", "few_rows"]),
        (6144, 2048, 16, ["cublas", "split_k"]),
        (6144, 2048, 129, ["cublas", "cublas"]),
        (4096, 6144, 2, ["tiled", "split_k"]),
        (4096, 6144, 64, ["tiled", "split_k"]),
        (4096, 6144, 65, ["cublas", "cublas"]),
        (1024, 151936, 2, ["cublas"]),
    ],
)
def test_which_kernel_serves(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, rows: int, kernels: list[str]
) -> None:
    used = []

    def runner(name: str, weight: dict[str, Tensor], *_: object, **__: object) -> object:
        used.append(name)
        return lambda x, **_: x.new_empty(x.shape[0], weight["weight"].shape[0])

    monkeypatch.setattr("nanovllm.kernels.linear.choose.runner", runner)
    linear = make_linear(inputs, outputs, context(torch.bfloat16, torch.device("meta"), kernels=True))
    x = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
    linear(x)
    if len(kernels) > 1:
        linear(x, add_to=SplitKResidual(x.new_empty(rows, outputs)))
    assert used == kernels


@pytest.mark.parametrize(("rows", "kernels"), [(64, ["tiled", "split_k"]), (65, ["cublas", "cublas_bias"])])
def test_which_kernel_serves_with_a_bias(rows: int, kernels: list[str]) -> None:
    """The o projection of gpt-oss-20b."""
    linear = make_linear(4096, 2880, context(torch.bfloat16, torch.device("meta"), kernels=True), bias=True)
    choices = (
        linear._kernels.choose(linear.weight, linear.bias, rows=rows, gated=False, added=added, whole=True)
        for added in (False, True)
    )
    assert [chosen.kernel.name for chosen in choices] == kernels
    alone = linear._kernels.choose(linear.weight, linear.bias, rows=65, gated=False, added=True, whole=False)
    assert alone.kernel.name == "cublas"  # other ranks' results are to be added first


def test_a_deterministic_row_does_not_depend_on_the_others() -> None:
    for quantization in (None, "int8"):
        linear, norm, x = case(5, 96, torch.float32, deterministic=True, quantization=quantization)
        for activation in (None, "silu"):
            whole = linear(Residual(x), norm=norm, activation=activation)
            assert torch.equal(whole[:1], linear(Residual(x[:1]), norm=norm, activation=activation))
