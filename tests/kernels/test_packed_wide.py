"""The warp-specialized linear for packed weights: compared to plain torch on a Hopper GPU; elsewhere only compiled."""

from pathlib import Path

import pytest
import torch

from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.linear.packed import dequantize_reference
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import CASES, random_packed

COMPILE = """
from nanovllm.kernels.linear import packed_wide
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.packed_wide import WideTile, packed_wide_linear, packed_wide_split_k_linear

packed_wide.launch, packed_wide.num_sms = compile, lambda: 132
scale, zero = torch.empty(512, 4, dtype=torch.float16), torch.empty(512, 4, dtype=torch.uint8)
int4 = PackedWords("int4", 64, torch.empty(512, 64, dtype=torch.int32), scale, zero=zero)
mxfp4 = PackedWords("fp4", 32, torch.empty(512, 64, dtype=torch.int32), torch.empty(512, 16, dtype=torch.uint8))
x = torch.empty(64, 512, dtype=torch.bfloat16)
packed_wide_linear(x, int4, gated=True, pdl=True, tile=WideTile(64, 3))
packed_wide_linear(x, mxfp4, x[0], tile=WideTile(32, 1, k_parts=2))
packed_wide_split_k_linear(x, int4, pdl=True, tile=WideTile(64, 2), splits=2)
"""
SERVED = [name for name, case in CASES.items() if not case.get("minimum")]
TILES = [(16, 1, 1), (32, 3, 1), (64, 2, 1), (64, 1, 3), (128, 2, 1), (128, 1, 2)]


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    assert [one.num_programs for one in found] == [3, 16, 8]
    assert all(one.instructions == ("wgmma", "cp.async.bulk.tensor") for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", SERVED)
def test_against_torch(case: str, tile: tuple[int, ...]) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear.packed_wide import WideTile, packed_wide_linear, packed_wide_split_k_linear

    n, k, dtype, place = 360, 1024, torch.float16 if tile[2] > 1 else torch.bfloat16, WideTile(*tile)
    torch.manual_seed(tile[0])
    weight = random_packed(n, k, **CASES[case])
    dense, bias = dequantize_reference(weight), torch.randn(n, device="cuda").to(dtype)
    for m in (1, 17, 200):
        x = torch.randn(m, 2, k, device="cuda").to(dtype)[:, 1]  # a row may be part of a wider one
        for gated in (False, True):
            actual = packed_wide_linear(x, weight, bias, gated=gated, pdl=True, tile=place)
            close(actual, linear_reference(x, dense, bias=bias, gated=gated))
        sums = packed_wide_split_k_linear(x, weight, bias, pdl=True, tile=place, splits=3)
        assert sums.shape == (3, m, n) and sums.dtype == torch.float32
        close(sums.sum(0).to(dtype), linear_reference(x, dense, bias=bias))


@pytest.mark.gpu
def test_more_tiles_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear import packed_wide

    monkeypatch.setattr(packed_wide, "num_sms", lambda: 3)
    torch.manual_seed(0)
    weight, x = random_packed(512, 512, **CASES["int4 zero"]), torch.randn(1100, 512, device="cuda").bfloat16()
    for tile in (packed_wide.WideTile(64, 2), packed_wide.WideTile(64, 1, k_parts=2)):
        actual = packed_wide.packed_wide_linear(x, weight, tile=tile)
        close(actual, linear_reference(x, dequantize_reference(weight)))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < {torch.bfloat16: 2e-2, torch.float16: 4e-3}[actual.dtype], error
