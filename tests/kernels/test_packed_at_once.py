"""The linear whose programs request all their words at once: compared to plain torch on a Hopper GPU; elsewhere only
compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.kernels.elementwise.rms_norm import rms_norm, rms_norm_reference
from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.at_once_tile import MOST_BYTES, AtOnceTile, at_once_tile
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.linear.packed import dequantize_reference
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import random_packed

COMPILE = """
from nanovllm.kernels.linear import packed_at_once
from nanovllm.kernels.linear.at_once_tile import AtOnceTile
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.packed_at_once import packed_at_once_linear, packed_at_once_split_k_linear

packed_at_once.launch = compile
scale, zero = torch.empty(512, 16, dtype=torch.float16), torch.empty(512, 16, dtype=torch.uint8)
int4 = PackedWords("int4", 64, torch.empty(512, 256, dtype=torch.int32), scale, zero=zero)
int8 = PackedWords("int8", 64, torch.empty(512, 512, dtype=torch.int32), torch.empty(512, 1))
x = torch.empty(8, 2048, dtype=torch.bfloat16)
packed_at_once_linear(x, int4, gated=True, pdl=True, tile=AtOnceTile(2, 4))
packed_at_once_linear(x.half(), int4, gated=False, pdl=True, tile=AtOnceTile(1, 8, programs=3))
packed_at_once_split_k_linear(x, int8, x[0], tile=AtOnceTile(2, 4, splits=2))
"""
CASES: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4", "group": 128},
    "int4 zero": {"kind": "int4", "group": 128, "zero": True},
    "int4 zero 64": {"kind": "int4", "group": 64, "zero": True, "scale_type": torch.float32},
    "int4 zero 512": {"kind": "int4", "group": 512, "zero": True, "scale_type": torch.bfloat16},
    "int4 rows": {"kind": "int4", "group": 0, "zero": True},
    "int8": {"kind": "int8", "group": 64, "scale_type": torch.float32},
    "int8 zero": {"kind": "int8", "group": 128, "zero": True},
    "int8 rows": {"kind": "int8", "group": 0, "scale_type": torch.float32},
}
TILES = [AtOnceTile(1, 4), AtOnceTile(2, 4, 2), AtOnceTile(3, 8, 1, 2), AtOnceTile(1, 2, 4)]
LINEARS = [(6144, 4096), (4096, 4096), (24576, 4096), (10240, 5120), (4096, 12288), (8192, 14336), (5120, 17408)]


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    assert [one.num_programs for one in found] == [16, 32, 16]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_against_torch(case: str, tile: AtOnceTile) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear.packed_at_once import packed_at_once_linear, packed_at_once_split_k_linear

    n, k = 360, 2048
    torch.manual_seed(tile.sixteens)
    weight = random_packed(n, k, **CASES[case])
    dense = dequantize_reference(weight)
    for m, dtype in ((1, torch.bfloat16), (3, torch.float16), (8, torch.bfloat16)):
        x, bias = torch.randn(m, 2, k, device="cuda").to(dtype)[:, 1], torch.randn(n, device="cuda").to(dtype)
        x = x.abs() if m == 1 else x  # then what is subtracted is largest
        sums = packed_at_once_split_k_linear(x, weight, bias, pdl=True, tile=tile)
        assert sums.shape == (tile.splits, m, n) and sums.dtype == torch.float32
        close(sums.sum(0).to(dtype), linear_reference(x, dense, bias=bias))
        for gated in (False, True) if tile.splits == 1 else ():
            actual = packed_at_once_linear(x, weight, bias, gated=gated, pdl=True, tile=tile)
            close(actual, linear_reference(x, dense, bias=bias, gated=gated))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), LINEARS)
@pytest.mark.parametrize("case", ["int4 zero", "int8 rows"])
def test_in_a_graph(case: str, n: int, k: int) -> None:
    """The chosen tiles for the linears of some models, many times with programmatic dependent launch: every result is
    the same."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear.packed_at_once import packed_at_once_linear, packed_at_once_split_k_linear

    torch.manual_seed(0)
    weight, gain = random_packed(n, k, **CASES[case]), torch.rand(k, device="cuda").bfloat16()
    dense = dequantize_reference(weight)
    split = n <= k
    if at_once_tile(n, k, weight.bits, split=split) is None:
        return
    for m in (1, 5, 8):
        x = torch.randn(m, k, device="cuda").bfloat16()

        def run(gated: bool, x: torch.Tensor = x) -> torch.Tensor:
            normed = rms_norm(x, gain, 1e-6, pdl=True)
            if not split:
                return packed_at_once_linear(normed, weight, gated=gated, pdl=True)
            return packed_at_once_split_k_linear(normed, weight, pdl=True).sum(0).bfloat16()

        for gated in (False,) if split else (False, True):
            first = run(gated)
            close(first, linear_reference(rms_norm_reference(x, gain, 1e-6), dense, gated=gated))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [run(gated) for _ in range(20)]
            for _ in range(20):
                graph.replay()
            assert all(torch.equal(result, first) for result in results)


@pytest.mark.parametrize(("n", "k"), LINEARS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("split", [False, True])
def test_tiles_fit(n: int, k: int, bits: int, split: bool) -> None:
    """Two programs share a multiprocessor, and each has a whole number of steps."""
    tile = at_once_tile(n, k, bits, split=split)
    if k == 17408 or (not split and 16 * k * bits // 8 > MOST_BYTES):  # 17 parts of 1,024 columns
        assert tile is None
    else:
        assert tile is not None
        assert tile.divides(k, bits) and (split or tile.splits == 1)
        assert 16 * tile.sixteens * k * bits // 8 // tile.splits <= MOST_BYTES


@pytest.mark.parametrize(
    ("bits", "qkv", "o", "gate_up", "down"),  # the fastest that were measured for Qwen3-8B
    [
        (4, AtOnceTile(2, 8, 1, 2), AtOnceTile(4, 4, 4, 3), AtOnceTile(2, 8, 1, 2), AtOnceTile(4, 4, 6, 3)),
        (8, AtOnceTile(1, 8, 1, 3), AtOnceTile(1, 4, 2, 6), AtOnceTile(1, 8, 1, 3), AtOnceTile(1, 8, 4, 3)),
    ],
)
def test_chosen_tiles(bits: int, qkv: AtOnceTile, o: AtOnceTile, gate_up: AtOnceTile, down: AtOnceTile) -> None:
    assert at_once_tile(6144, 4096, bits, split=False) == qkv
    assert at_once_tile(4096, 4096, bits, split=True) == o
    assert at_once_tile(24576, 4096, bits, split=False) == gate_up
    assert at_once_tile(4096, 12288, bits, split=True) == down


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < {torch.bfloat16: 2e-2, torch.float16: 4e-3}[actual.dtype], error
