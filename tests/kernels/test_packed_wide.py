"""The warp-specialized linear for packed weights: compared to plain torch on a Hopper GPU; elsewhere only compiled."""

from pathlib import Path

import pytest
import torch

from nanovllm.kernels.elementwise.rms_norm import rms_norm, rms_norm_reference
from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.linear.packed import dequantize_reference
from nanovllm.kernels.linear.wide_tile import MICROSECONDS, SHARED_BYTES, WideTile, wide_tile
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import CASES, random_packed

COMPILE = """
from nanovllm.kernels.linear import packed_wide
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.packed_wide import packed_wide_linear, packed_wide_split_k_linear
from nanovllm.kernels.linear.wide_tile import WideTile

packed_wide.launch, packed_wide.num_sms = compile, lambda: 132
scale, zero = torch.empty(512, 4, dtype=torch.float16), torch.empty(512, 4, dtype=torch.uint8)
int4 = PackedWords("int4", 64, torch.empty(512, 64, dtype=torch.int32), scale, zero=zero)
mxfp4 = PackedWords("fp4", 32, torch.empty(512, 64, dtype=torch.int32), torch.empty(512, 16, dtype=torch.uint8))
x = torch.empty(64, 512, dtype=torch.bfloat16)
packed_wide_linear(x, int4, gated=True, pdl=True, tile=WideTile(64, 3))
packed_wide_linear(x, mxfp4, x[0], tile=WideTile(256, 2))
packed_wide_split_k_linear(x, int4, x[0], tile=WideTile(16, 1, k_parts=3), splits=2)
"""
SERVED = [name for name, case in CASES.items() if not case.get("minimum")]
TILES = list(MICROSECONDS)
# every kind with two tiles, one of which scales the weight, and every tile with one kind
PAIRS = [(case, TILES[(at + i * len(TILES) // 2) % len(TILES)]) for at, case in enumerate(SERVED) for i in (0, 1)]
PAIRS = list(dict.fromkeys(PAIRS + [("int4 zero", tile) for tile in TILES]))


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    assert [one.num_programs for one in found] == [3, 4, 64]
    wgmma, tma = "wgmma", "cp.async.bulk.tensor"
    assert [one.instructions for one in found] == [(wgmma, tma), (wgmma, tma), (tma,)]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "tile"), PAIRS, ids=str)
def test_against_torch(case: str, tile: WideTile) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear.packed_wide import packed_wide_linear, packed_wide_split_k_linear

    n, k = 360, 1024
    dtype = torch.float16 if tile.k_parts > 1 else torch.bfloat16
    torch.manual_seed(tile.block_m)
    weight = random_packed(n, k, **CASES[case])
    dense, bias = dequantize_reference(weight), torch.randn(n, device="cuda").to(dtype)
    for m in (1, 17, 300):
        x = torch.randn(m, 2, k, device="cuda").to(dtype)[:, 1]  # a row may be part of a wider one
        for gated in (False, True):
            actual = packed_wide_linear(x, weight, bias, gated=gated, pdl=True, tile=tile)
            close(actual, linear_reference(x, dense, bias=bias, gated=gated))
        sums = packed_wide_split_k_linear(x, weight, bias, pdl=True, tile=tile, splits=3)
        assert sums.shape == (3, m, n) and sums.dtype == torch.float32
        close(sums.sum(0).to(dtype), linear_reference(x, dense, bias=bias))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile",
    [WideTile(8, 1, 3), WideTile(16, 1, 3), WideTile(64, 1, 2), WideTile(64, 3), WideTile(128, 1, 2), WideTile(256, 2)],
    ids=str,
)
@pytest.mark.parametrize(("case", "span"), [("int4 zero", 256), ("int8 rows", 128)])
def test_many_tiles_per_program(case: str, span: int, tile: WideTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 5 and 6 spans: the K parts of one take turns that go on in the next."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear import packed_wide

    monkeypatch.setattr(packed_wide, "num_sms", lambda: 3)
    torch.manual_seed(0)
    k = 16 * span
    weight, x = random_packed(512, k, **CASES[case]), torch.randn(600, k, device="cuda").bfloat16()
    expected = linear_reference(x, dequantize_reference(weight))
    for splits in (1, 3):
        sums = packed_wide.packed_wide_split_k_linear(x, weight, tile=tile, splits=splits)
        close(sums.sum(0).bfloat16(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [WideTile(128, 1, 2), WideTile(64, 1, 2), WideTile(128, 3), WideTile(8, 1, 3)], ids=str
)
def test_the_same_bits_each_time(tile: WideTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps wait for each other in an order that time decides: it must not show."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear import packed_wide

    torch.manual_seed(0)
    weight, x = random_packed(512, 4096, **CASES["int4 zero"]), torch.randn(600, 4096, device="cuda").bfloat16()
    for sms in (3, 132):
        monkeypatch.setattr(packed_wide, "num_sms", lambda sms=sms: sms)
        for splits in (1, 3):
            first, *others = (
                packed_wide.packed_wide_split_k_linear(x, weight, tile=tile, splits=splits) for _ in range(300)
            )
            assert torch.stack([(one != first).any() for one in others]).sum() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (10240, 5120), (4096, 12288)])
@pytest.mark.parametrize("case", ["int4 zero", "int8 rows"])
def test_few_rows_in_a_graph(case: str, n: int, k: int) -> None:
    """The chosen tiles for the linears of Qwen3-8B, and one with two tiles per program (10,240 rows), many times with
    programmatic dependent launch: every result is the same."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    from nanovllm.kernels.linear.packed_wide import packed_wide_linear, packed_wide_split_k_linear

    torch.manual_seed(0)
    weight, gain = random_packed(n, k, **CASES[case]), torch.rand(k, device="cuda").bfloat16()
    dense = dequantize_reference(weight)
    for m in (1, 5, 8):
        x = torch.randn(m, k, device="cuda").bfloat16()

        def run(gated: bool, x: torch.Tensor = x) -> torch.Tensor:
            normed = rms_norm(x, gain, 1e-6, pdl=True)
            if gated or n > k:
                return packed_wide_linear(normed, weight, gated=gated, pdl=True)
            return packed_wide_split_k_linear(normed, weight, pdl=True).sum(0).bfloat16()

        for gated in (False, True):
            expected = linear_reference(rms_norm_reference(x, gain, 1e-6), dense, gated=gated)
            first = run(gated)
            close(first, expected)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [run(gated) for _ in range(20)]
            for _ in range(20):
                graph.replay()
            assert all(torch.equal(result, first) for result in results)


@pytest.mark.parametrize(
    ("rows", "gate_up", "qkv", "o"),  # the fastest that were measured for Qwen3-8B, except for 2,047 rows
    [
        (1, WideTile(8, 3), WideTile(8, 1, 3), (WideTile(8, 1, 3), 2)),
        (9, WideTile(16, 3), WideTile(16, 1, 3), (WideTile(16, 1, 3), 2)),
        (17, WideTile(32, 3), WideTile(32, 1, 2), (WideTile(32, 1, 2), 2)),
        (64, WideTile(64, 3), WideTile(64, 1, 2), (WideTile(64, 1, 2), 2)),
        (128, WideTile(128, 3), WideTile(128, 1, 2), (WideTile(128, 1, 2), 2)),
        (256, WideTile(128, 3), WideTile(128, 2), (WideTile(128, 1, 2), 1)),
        (512, WideTile(256, 2), WideTile(128, 3), (WideTile(128, 2), 1)),
        (2047, WideTile(256, 2), WideTile(256, 2), (WideTile(256, 2), 1)),
    ],
)
def test_chosen_tiles(rows: int, gate_up: WideTile, qkv: WideTile, o: tuple[WideTile, int]) -> None:
    one = {"most_splits": 1, "num_sms": 132}
    split = {"most_splits": 4 if rows <= 128 else 1, "num_sms": 132}
    assert wide_tile(rows, 24576, 4096, **one) == (gate_up, 1)
    assert wide_tile(rows, 6144, 4096, **one) == (qkv, 1)
    assert wide_tile(rows, 4096, 4096, **split) == wide_tile(rows, 4096, 12288, **split) == o


def test_scaled_before_the_product() -> None:
    """More than 64 rows, or small groups; a scale per row is applied at the end."""
    for case, small, large in (("int4", False, True), ("int4 zero 32", True, True), ("int4 rows", False, False)):
        weight = random_packed(64, 1024, **CASES[case])
        assert WideTile(64, 3).scales_weight(weight) == small and WideTile(128, 3).scales_weight(weight) == large


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", SERVED)
def test_stages(case: str, tile: WideTile) -> None:
    """Enough for each K part, within shared memory: a warpgroup holds up to a span of inputs at once."""
    weight = random_packed(64, 1024, **CASES[case])
    stages, x_stages = tile.stages(weight)
    pieces = weight.num_pairs if tile.block_m <= 16 else 1
    x_bytes = x_stages * pieces * tile.block_m * weight.distance * 2
    sums = (tile.k_parts - 1) * tile.rows * tile.block_m * 4
    assert stages % tile.k_parts == x_stages % tile.k_parts == 0
    assert stages >= 2 * tile.k_parts and x_stages * pieces >= weight.num_pairs * tile.k_parts
    assert stages * tile.rows * weight.distance * 2 + x_bytes + sums <= SHARED_BYTES


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < {torch.bfloat16: 2e-2, torch.float16: 4e-3}[actual.dtype], error
