"""int8 weights with one scale per output row: every kernel that takes them against plain torch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.linear import tiled as tiled_linear
from nanovllm.kernels.linear.dequantize import dequantize, dequantize_reference
from nanovllm.kernels.linear.matmul import matmul, matmul_reference
from nanovllm.kernels.linear.one_row import linear_reference, one_row_linear
from nanovllm.kernels.moe import tiles as moe_tiles
from nanovllm.kernels.moe.experts import experts_forward, experts_forward_reference
from nanovllm.kernels.moe.grouped import grouped_forward
from nanovllm.kernels.moe.tiles import Tiles
from nanovllm.kernels.moe.weights import ExpertWeights
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.support import DEVICE, with_halves

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EPS = 1e-6
SIZES = [(40, 144), (48, 512), (24, 200), (2, 8), (134, 128)]  # (N, K)
if DEVICE == "cuda":
    SIZES += [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288)]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's tl.dot does not support bfloat16
PDL = [False, pytest.param(True, marks=pytest.mark.gpu)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def int8_weight(*shape: int) -> tuple[Tensor, Tensor]:
    """A weight that has both ends of its range, and scales of which the largest is ten times the smallest."""
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
    weight.view(-1)[0], weight.view(-1)[-1] = -127, 127
    scale = (0.1 + 0.9 * torch.rand(shape[:-1], device=DEVICE)) / (127 * shape[-1] ** 0.5)
    return weight, scale


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < TOLERANCE[actual.dtype], error


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_row(dtype: torch.dtype, n: int, k: int, pdl: bool) -> None:
    torch.manual_seed(n + k)
    x, norm_weight, bias = random(1, k, dtype=dtype) * 3, random(k, dtype=dtype) + 1, random(n, dtype=dtype)
    weight, scale = int8_weight(n, k)
    for norm, gated, add, with_bias in [(1, 0, 0, 1), (0, 0, 1, 0), (1, 1, 1, 1), (0, 1, 0, 0)]:
        residual = random(1, n // 2 if gated else n, dtype=dtype) if add else None
        options = dict(
            scale=scale,
            bias=bias if with_bias else None,
            norm_weight=norm_weight if norm else None,
            eps=EPS,
            gated=bool(gated),
        )
        expected = linear_reference(x, weight, residual=residual, **options)
        actual = one_row_linear(x, weight, residual=residual, pdl=pdl, **options)
        check(actual, expected)
        assert residual is None or actual is residual


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize(("dtype", "m"), with_halves([2, 17, 33, 65, tiled_linear.MAX_ROWS]))
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_tiles(dtype: torch.dtype, n: int, k: int, m: int, pdl: bool) -> None:
    torch.manual_seed(m + n + k)
    x = random(m, 2, k, dtype=dtype)[:, 1]  # a row may be part of a wider one
    (weight, scale), bias = int8_weight(n, k), random(n, dtype=dtype)
    for gated, with_bias in [(0, 1), (1, 0), (1, 1)]:
        options = dict(scale=scale, bias=bias if with_bias else None, gated=bool(gated))
        check(
            tiled_linear.tiled_linear(x, weight, pdl=pdl, **options),
            linear_reference(x, weight, **options),
        )


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize(("dtype", "m"), with_halves([2, 17, 33, 65, 129]))
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_partial_sums_add_up(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int, k: int, m: int, pdl: bool
) -> None:
    torch.manual_seed(m + n + k)
    x, (weight, scale), bias = random(m, k, dtype=dtype), int8_weight(n, k), random(n, dtype=dtype)
    expected = linear_reference(x.float(), weight, scale=scale, bias=bias.float())
    for num_sms in (1, 1 << 30):  # no split, and as many as there can be
        monkeypatch.setattr(tiled_linear, "_device_limits", lambda sms=num_sms: (sms, 200_000))
        partial_sums = tiled_linear.split_k_linear(x, weight, bias, scale=scale, pdl=pdl)
        assert partial_sums.shape[1:] == (m, n) and partial_sums.dtype == torch.float32
        torch.testing.assert_close(partial_sums.sum(0), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (3, 80, 136), (65, 48, 128), (130, 136, 72)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_deterministic_product(m: int, n: int, k: int, dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(m)
    x, (weight, scale) = random(m, 2, k, dtype=dtype)[:, 1], int8_weight(n, k)
    bias = random(n, dtype=dtype) if with_bias else None
    together = matmul(x, weight, bias, scale=scale)
    check(together, matmul_reference(x, weight, bias, scale=scale))
    for row in {0, m // 2, m - 1}:
        assert torch.equal(matmul(x[row : row + 1], weight, bias, scale=scale), together[row : row + 1])


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "k"), [*SIZES, (3, 5000), (1, 1)])
def test_dequantize(n: int, k: int, dtype: torch.dtype, pdl: bool) -> None:
    torch.manual_seed(n + k)
    weight, scale = int8_weight(n, k)
    expected = dequantize_reference(weight, scale, dtype)
    # the interpreter truncates where it should round to bfloat16
    tolerance = 2**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.0
    result = dequantize(weight, scale, dtype, pdl=pdl)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=0.0)
    out = torch.empty(n + 1, k, dtype=dtype, device=DEVICE).fill_(7)
    assert dequantize(weight, scale, dtype, out=out[:n], pdl=pdl).data_ptr() == out.data_ptr()
    assert torch.equal(out[:n], result) and (out[n] == 7).all(), "a row past the end was written"


def experts_case(num_tokens: int, top_k: int, *, hidden: int, size: int, dtype: torch.dtype) -> tuple[tuple, dict]:
    """The arguments of `experts_forward`, with six experts."""
    torch.manual_seed(num_tokens + hidden)
    gate_up, gate_up_scale = int8_weight(6, 2 * size, hidden)
    down, down_scale = int8_weight(6, hidden, size)
    experts = torch.rand(num_tokens, 6).argsort(dim=1)[:, :top_k].to(DEVICE, torch.int32).contiguous()
    weights = torch.rand(num_tokens, top_k).to(DEVICE, dtype)
    scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    return (random(num_tokens, hidden, dtype=dtype), gate_up, down, weights, experts), scales


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden", "size", "dtype"),
    [
        (1, 4, 48, 24, torch.bfloat16),  # one kernel per projection, every pair reads its expert
        (3, 2, 72, 20, torch.float32),
        (5, 2, 48, 24, HALF),  # pairs grouped by expert, by tiles of every size
        (24, 3, 136, 72, HALF),
        (40, 4, 20, 136, torch.float32),
    ],
)
def test_experts(num_tokens: int, top_k: int, hidden: int, size: int, dtype: torch.dtype, deterministic: bool) -> None:
    if deterministic and dtype == torch.bfloat16 and DEVICE == "cpu":
        dtype = HALF
    case, scales = experts_case(num_tokens, top_k, hidden=hidden, size=size, dtype=dtype)
    check(experts_forward(*case, **scales, deterministic=deterministic), experts_forward_reference(*case, **scales))
    residual = random(num_tokens, hidden, dtype=dtype)
    expected = experts_forward_reference(*case, **scales, residual=residual)
    check(experts_forward(*case, **scales, residual=residual, deterministic=deterministic), expected)


@pytest.mark.parametrize(
    "tiles", [moe_tiles.DECODE_TILES, moe_tiles.MEDIUM_TILES, moe_tiles.LARGE_TILES, moe_tiles.PREFILL_TILES]
)
def test_every_expert_tile_shape(tiles: Tiles) -> None:
    (x, gate_up, down, weights, experts), scales = experts_case(20, 2, hidden=144, size=72, dtype=HALF)
    layer, out = ExpertWeights(gate_up, down, **scales), torch.empty_like(x)
    grouped_forward(x, layer, weights, experts, out, None, tiles, pdl=False)
    check(out, experts_forward_reference(x, gate_up, down, weights, experts, **scales))


@pytest.mark.parametrize("num_tokens", [3, 6])
def test_choices_of_no_expert(num_tokens: int) -> None:
    case, scales = experts_case(num_tokens, 2, hidden=48, size=24, dtype=torch.float32)
    case[4][1] = -1
    case[4][2, 1] = 6
    actual = experts_forward(*case, **scales)
    check(actual, experts_forward_reference(*case, **scales))
    assert not actual[1].any()


COMPILE = """
from nanovllm.kernels.linear import matmul, one_row, tiled
from nanovllm.kernels.moe import grouped, rows
from nanovllm.kernels.moe.experts import experts_forward

def int8(*shape):
    return torch.empty(shape, dtype=torch.int8), torch.empty(shape[:-1])

for module in (grouped, matmul, one_row, rows, tiled):
    module.launch = compile
tiled._device_limits = lambda: (132, 232_448)
half = dict(dtype=torch.bfloat16)
weight, scale = int8(2048, 1024)
one_row.one_row_linear(torch.empty(1, 1024, **half), weight, scale=scale, pdl=True)
for m in (16, 64, 256):
    tiled.tiled_linear(torch.empty(m, 1024, **half), weight, scale=scale, gated=True, pdl=True)
x = torch.empty(128, 1024, **half)
tiled.split_k_linear(x, weight, scale=scale, pdl=True)
matmul.matmul(x, weight, scale=scale)
(gate_up, gate_up_scale), (down, down_scale) = int8(8, 512, 1024), int8(8, 1024, 256)
for tokens in (1, 16, 1024):
    x, choices = torch.empty(tokens, 1024, **half), torch.empty(tokens, 2, dtype=torch.int32)
    scales = dict(gate_up_scale=gate_up_scale, down_scale=down_scale)
    experts_forward(x, gate_up, down, torch.empty(tokens, 2, **half), choices, **scales, pdl=True)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert len(compile_for_hopper(COMPILE, tmp_path)) == 1 + 3 + 2 + 2 + 4 * 2
