"""The Gluon kernels for fp8 weights and inputs: compared with plain torch on a Hopper GPU; elsewhere only compiled."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.elementwise.rms_norm import add_partial_sums_reference, rms_norm_reference
from nanovllm.kernels.features import gluon_usable
from nanovllm.kernels.linear.fp8_inputs import round_inputs_reference, scaled_mm_linear
from nanovllm.kernels.linear.one_row import linear_reference
from nanovllm.kernels.linear.packed import PackedWords, dequantize_reference
from nanovllm.kernels.linear.run import _with_norm_and_sums
from nanovllm.kernels.select import LinearCase, select_linear
from nanovllm.layers.split_k_residual import SplitKResidual
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.packed_weights import random_packed

TOLERANCE = 4e-3
FORMS = {"fp8": {"group": 0}, "fp8_block": {"group": 128, "scale_rows": 128}}
COMPILE = """
from nanovllm.kernels.linear import fp8_inputs, fp8_many_rows, fp8_some_rows
from nanovllm.kernels.linear.packed import PackedWords

for module in (fp8_inputs, fp8_many_rows, fp8_some_rows):
    module.launch, module.num_sms, module._device_limits = compile, lambda: 132, lambda: (132, 232_448)

def weight(n, k, rows, group):
    words = torch.empty(n, k // 4, dtype=torch.int32)
    return PackedWords("fp8", 64, words, torch.empty(n // rows, k // group), rows, rounds_inputs=True)

def x(rows):
    return torch.empty(rows, 512, dtype=torch.bfloat16)

per_row, per_block = weight(16384, 512, 1, 512), weight(16384, 512, 128, 128)
for m, one in ((1, per_block), (17, per_row), (160, per_row), (256, per_block)):
    assert fp8_some_rows.fp8_some_rows_linear(x(m), one, gated=True, pdl=True).shape == (m, 8192)
norm = {"norm_weight": x(1)[0], "eps": 1e-6, "partial_sums": torch.empty(4, 16, 512)}
assert fp8_some_rows.fp8_some_rows_linear(x(16), per_row, pdl=True, **norm).shape == (16, 16384)
narrow = weight(1024, 512, 128, 128)
bias = torch.empty(1024, dtype=torch.bfloat16)
assert fp8_some_rows.fp8_some_rows_split_k_linear(x(200), narrow, bias, pdl=True).shape == (4, 200, 1024)
assert fp8_many_rows.fp8_many_rows_linear(x(300), per_row, gated=True).shape == (300, 8192)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    products = [one for one in found if one.kernel != "_round_inputs_kernel"]
    assert Counter(one.kernel for one in products) == {"_fp8_some_rows_kernel": 6, "_fp8_many_rows_kernel": 1}
    assert all(one.instructions == ("wgmma", "cp.async.bulk.tensor") for one in products)
    assert [one.num_programs for one in products] == [86, 86, 86, 132, 86, 64, 132]


def test_chosen_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-8B's o and down: smaller ones only for few rows, and only while each has a multiprocessor (132)."""
    from nanovllm.kernels.linear import fp8_some_rows
    from nanovllm.kernels.linear.fp8_some_rows import Fp8Tile

    monkeypatch.setattr(fp8_some_rows, "num_sms", lambda: 132)

    def tile(m: int, n: int, k: int, *, blocked: bool = False) -> Fp8Tile:
        return fp8_some_rows.some_rows_tile(m, n, k, split=True, blocked=blocked)

    assert [tile(m, 4096, 12288) for m in (1, 16, 17)] == [Fp8Tile(8, 2, 4), Fp8Tile(16, 2, 4), Fp8Tile(32, 3, 4)]
    assert [tile(33, 4096, 12288), tile(64, 4096, 4096), tile(64, 4096, 4096, blocked=True)] == [
        Fp8Tile(64, 2, 4), Fp8Tile(64, 2, 2), Fp8Tile(64, 3, 4)
    ]  # fmt: skip
    assert [tile(m, 4096, 12288) for m in (128, 129, 192, 193)] == [
        Fp8Tile(128, 2, 4), Fp8Tile(192, 2, 4), Fp8Tile(192, 2, 4), Fp8Tile(128, 2, 2)
    ]  # fmt: skip
    assert tile(160, 4096, 12288, blocked=True) == tile(160, 4096, 4096) == Fp8Tile(128, 2, 2)
    assert fp8_some_rows.some_rows_tile(160, 24576, 4096, split=False, blocked=False) == Fp8Tile(192, 3)
    assert [tile(m, 4096, 4096) for m in (65, 128, 129)] == [Fp8Tile(64, 2, 2), Fp8Tile(64, 2, 2), Fp8Tile(128, 2, 2)]
    assert tile(128, 5120, 4096) == Fp8Tile(128, 2, 2)  # twice as many programs do not fit
    assert tile(8, 4096, 4096) == tile(8, 4096, 12288, blocked=True) == tile(8, 5120, 17408) == Fp8Tile(8, 3, 4)


def chosen(
    form: str, rows: int, *, outputs: int = 6144, gated: bool = False, added: bool = False, **changed: bool
) -> str:
    flags = dict(half=True, bfloat16=True, bias=False, whole=True, deterministic=False, gluon=True) | changed
    columns, scale_rows = (4096, 1) if form == "fp8" else (128, 128)
    case = LinearCase(
        form, rows, outputs, 4096, gated=gated, added=added, distance=64, group=columns, scale_rows=scale_rows,
        rounds_inputs=True, **flags,
    )  # fmt: skip
    kernel = select_linear(case)
    assert kernel is not None
    return kernel.name


def test_which_kernel_runs() -> None:
    assert [chosen("fp8", rows) for rows in (1, 256, 257)] == ["fp8_some_rows", "fp8_some_rows", "fp8_scaled_mm"]
    assert [chosen("fp8", rows, outputs=1024) for rows in (16, 17)] == ["packed_rows", "fp8_some_rows"]
    assert chosen("fp8", 1, added=True) == chosen("fp8_block", 256, added=True) == "fp8_some_rows_split_k"
    assert chosen("fp8", 64, added=True, whole=False) == "fp8_some_rows"
    for changed in ({"gated": True}, {"bias": True}, {"bfloat16": False}):
        assert chosen("fp8", 300, **changed) == "fp8_many_rows"
    assert chosen("fp8", 300, added=True) == "fp8_scaled_mm_sum"
    assert chosen("fp8", 300, added=True, bias=True) == chosen("fp8_block", 300, added=True) == "fp8_many_rows_sum"
    assert chosen("fp8", 300, added=True, whole=False) == "fp8_scaled_mm"
    assert chosen("fp8_block", 1) == chosen("fp8_block", 64) == "fp8_some_rows"
    assert chosen("fp8_block", 300) == chosen("fp8_block", 8192, gated=True) == "fp8_many_rows"
    assert chosen("fp8", 16, gluon=False) == "packed_rows" and chosen("fp8", 64, gluon=False) == "fp8"
    assert chosen("fp8", 300, gluon=False) == "packed_dequantized"
    assert chosen("fp8", 1, deterministic=True) == chosen("fp8", 300, deterministic=True) == "packed_deterministic"


def test_a_norm_adds_what_is_pending() -> None:
    """The kernel gets the rows and the partial sums, which it adds to them in place."""
    rows, sums = torch.zeros(2, 3), torch.ones(4, 2, 3)
    norm = SimpleNamespace(weight=torch.ones(3), eps=1e-6, fuses=True)

    def launch(x: Tensor, *, norm_weight: Tensor, eps: float, partial_sums: Tensor | None) -> Tensor:
        if partial_sums is not None:
            x += partial_sums.sum(0)
        return x * norm_weight

    stream = SplitKResidual(rows)
    stream.add_later(sums)
    for _ in range(2):  # the second time there is nothing to add
        assert torch.equal(_with_norm_and_sums(launch, stream, norm=norm), torch.full((2, 3), 4.0))
    assert torch.equal(stream.rows, torch.full((2, 3), 4.0))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def case(form: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, PackedWords, Tensor, Tensor, Tensor]:
    """x, the weight, a bias, and both factors in float32, rounded."""
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernels are written for")
    torch.manual_seed(m + n + k)
    weight = random_packed(n, k, kind="fp8", scale_type=torch.float32, **FORMS[form])
    x = torch.randn(m, k, device="cuda").to(dtype)
    rounded = round_inputs_reference(x, weight.scale.shape[1])
    return x, weight, torch.randn(n, device="cuda").to(dtype), rounded, dequantize_reference(weight)


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual.float() - expected).norm() / expected.norm() < TOLERANCE)


ROWS, SHAPES = (1, 8, 16, 17, 33, 64, 100, 131, 192, 256), ((1216, 640), (2560, 4096), (16384, 384))
ODD = [(1, 2064, 2176), (16, 2064, 2176)]  # an odd number of 16 columns, and of blocks


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "n", "k"), [*((m, *shape) for m in ROWS for shape in SHAPES), *ODD])
def test_some_rows(form: str, m: int, n: int, k: int) -> None:
    from nanovllm.kernels.linear.fp8_some_rows import fp8_some_rows_linear, fp8_some_rows_split_k_linear

    for dtype in (torch.bfloat16, torch.float16):
        x, weight, bias, rounded, dense = case(form, m, n, k, dtype)
        for gated in (False, True):
            expected = linear_reference(rounded, dense, bias=bias, gated=gated)
            actual = fp8_some_rows_linear(x, weight, bias, gated=gated, pdl=True)
            assert actual.dtype == dtype and close(actual, expected)
            assert torch.equal(actual, fp8_some_rows_linear(x, weight, bias, gated=gated, pdl=True))
        sums = fp8_some_rows_split_k_linear(x, weight, bias, pdl=True)
        assert close(sums.sum(0), linear_reference(rounded, dense, bias=bias))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "splits"), [(1, 0), (8, 4), (100, 2)])
def test_norm_before_some_rows(form: str, m: int, splits: int) -> None:
    from nanovllm.kernels.linear.fp8_some_rows import fp8_some_rows_linear

    x, weight, _, _, dense = case(form, m, 2560, 4096, torch.bfloat16)
    norm_weight, sums = torch.rand(4096, device="cuda").bfloat16(), torch.randn(splits, m, 4096, device="cuda")
    added = add_partial_sums_reference(x, sums)
    norm = {"norm_weight": norm_weight, "eps": 1e-6, "partial_sums": sums if splits else None}
    actual = fp8_some_rows_linear(x, weight, pdl=True, **norm)
    torch.testing.assert_close(x, added)  # in place
    rounded = round_inputs_reference(rms_norm_reference(x, norm_weight, 1e-6), weight.scale.shape[1])
    assert close(actual, linear_reference(rounded, dense))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [1, 257, 1000, 8192])
@pytest.mark.parametrize(("n", "k"), [(128, 384), (1152, 640), (6144, 4096)])
def test_many_rows(form: str, m: int, n: int, k: int) -> None:
    from nanovllm.kernels.linear.fp8_many_rows import fp8_many_rows_linear

    for dtype in (torch.bfloat16, torch.float16):
        x, weight, bias, rounded, dense = case(form, m, n, k, dtype)
        for gated in (False, True):
            expected = linear_reference(rounded, dense, bias=bias, gated=gated)
            actual = fp8_many_rows_linear(x, weight, bias, gated=gated)
            assert actual.dtype == dtype and close(actual, expected)
    if form == "fp8":
        x, weight, _, rounded, dense = case(form, m, n, k, torch.bfloat16)
        assert close(scaled_mm_linear(x, weight), linear_reference(rounded, dense))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_norm_before_many_rows(form: str) -> None:
    """With one sum of x's type to add, as the linear before gives it."""
    from nanovllm.kernels.linear.fp8_many_rows import fp8_many_rows_linear

    x, weight, _, _, dense = case(form, 300, 2560, 4096, torch.bfloat16)
    norm_weight, sums = torch.rand(4096, device="cuda").bfloat16(), torch.randn(1, 300, 4096, device="cuda").bfloat16()
    added = add_partial_sums_reference(x, sums)
    rounded = round_inputs_reference(rms_norm_reference(added, norm_weight, 1e-6), weight.scale.shape[1])
    for linear in (fp8_many_rows_linear, *([scaled_mm_linear] if form == "fp8" else [])):
        own = x.clone()
        actual = linear(own, weight, norm_weight=norm_weight, eps=1e-6, partial_sums=sums)
        torch.testing.assert_close(own, added)  # in place
        assert close(actual, linear_reference(rounded, dense))
