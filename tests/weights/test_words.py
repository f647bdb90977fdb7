"""Packed weights in the order of words: the same numbers as in the order of columns, and what kernels make of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.checkpoint.packed import words
from nanovllm.checkpoint.packed.groups import pack_nibbles
from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.checkpoint.packed.words import DISTANCES, WordOrder, from_words, to_words
from nanovllm.errors import ConfigError
from nanovllm.kernels.linear.choose import choose_kernel
from nanovllm.kernels.linear.packed import FP4_PLACES, dequantize_reference
from nanovllm.layers.moe import packed_kernels_serve
from nanovllm.weights import fp4, fp8, groups, int8
from nanovllm.weights.format import StoredWeight, WeightFormat
from nanovllm.weights.forms import Fp4Form, Fp8Form, GroupForm
from tests.kernels.support import DEVICE

N, K = 16, 256
FORMATS: dict[str, WeightFormat] = {
    "int4": groups.GroupFormat(GroupForm(4, 128, zero=True), columns=K),
    "int8": groups.GroupFormat(GroupForm(8, 32), columns=K),
    "int8 rows": int8.Int8Format(),
    "fp8 rows": fp8.Fp8Format(Fp8Form(rounds_inputs=False)),
    "fp8 blocks": fp8.Fp8Format(Fp8Form((16, 128), rounds_inputs=False), starts=(16, 128)),
    "fp8 inputs": fp8.Fp8Format(Fp8Form((16, 128)), starts=(16, 128)),
    "mxfp4": fp4.Fp4Format(Fp4Form(32), start=0, quantizes=True),
    "nvfp4": fp4.Fp4Format(Fp4Form(16, has_unit=True), start=0, quantizes=True),
}
KERNELS = {1: "packed_rows", 20: "packed_tiled", 257: "packed_dequantized"}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("bits", "floats"), [(4, False), (4, True), (8, False)])
def test_order(bits: int, floats: bool, distance: int) -> None:
    """Each number is where the kernels look for it."""
    order = WordOrder(bits, distance, floats)
    columns = torch.randint(0, 1 << bits, (3, 2 * order.span), dtype=torch.uint8)
    codes = pack_nibbles(columns) if bits == 4 else columns
    found = to_words(codes, order)
    assert torch.equal(from_words(found, order), codes)
    packed = found.view(torch.int32)
    for span, pair, word in torch.cartesian_prod(*map(torch.arange, (2, order.num_pairs, distance // 2))).tolist():
        value, column = packed[:, span * distance // 2 + word], span * order.span + pair * distance + 2 * word
        for i in (0, 1):
            places = FP4_PLACES[pair] if floats else range(bits * pair, bits * (pair + 1))
            taken = sum(((value >> (place + 16 * i) % 32) & 1) << bit for bit, place in enumerate(places))
            assert torch.equal(torch.as_tensor(taken), columns[:, column + i].int())


@pytest.fixture
def in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have the order of words on a CPU too."""
    for module in (groups, fp8, fp4, int8):
        monkeypatch.setattr(module, "words_on", lambda device, *sizes: words.word_order(*sizes))


def loaded(form: WeightFormat, dense: Tensor, dtype: torch.dtype = torch.float16) -> StoredWeight:
    weight = form.empty(tuple(dense.shape), dtype=dtype, device=dense.device)
    for expert, rows in enumerate(dense if dense.dim() == 3 else [dense]):
        index: Any = (slice(0, dense.shape[-2]),)
        weight.load((expert, *index) if dense.dim() == 3 else index, InMemory(rows), ())
    return weight


def test_too_large_scales(in_words: None) -> None:
    """A number times its scale must fit what the kernels for experts compute with."""
    largest = torch.full((N, K), 4 * 2.0**33)  # 4 times the largest scale
    assert torch.equal(loaded(FORMATS["mxfp4"], largest, torch.float32).dequantized(), largest)
    with pytest.raises(ValueError, match="larger than 2\\^33"):
        loaded(FORMATS["mxfp4"], 2 * largest, torch.float32)


@pytest.mark.parametrize("case", FORMATS)
def test_same_numbers(case: str, request: pytest.FixtureRequest) -> None:
    for shape in ((N, K), (2, N, K))[: 1 if case == "int8 rows" else 2]:  # whose experts have the order of columns
        dense = torch.randn(shape)
        plain = loaded(FORMATS[case], dense)
        request.getfixturevalue("in_words")
        weight = loaded(FORMATS[case], dense)
        assert torch.equal(weight.dequantized(), plain.dequantized())
        expected = plain.dequantized()
        assert torch.equal(dequantize_reference(weight.kernel_arguments()["weight"]).to(expected.dtype), expected)


@pytest.mark.usefixtures("in_words")
@pytest.mark.parametrize("case", FORMATS)
def test_chosen_kernels(case: str) -> None:
    torch.manual_seed(0)
    weight, bias = loaded(FORMATS[case], torch.randn(N, K, device=DEVICE)), torch.randn(N, device=DEVICE).half()
    for rows, name in KERNELS.items():
        x = torch.randn(rows, K, device=DEVICE).half()
        options: dict[str, Any] = dict(gated=False, added=False, whole=True, gluon=False, pdl=False)
        chosen = choose_kernel(weight, bias, rows=rows, dtype=x.dtype, deterministic=False, **options)
        assert chosen is not None
        if case == "nvfp4" and rows == 1:
            name = "packed_tiled"
        if case == "fp8 inputs" and 16 < rows <= 128:
            name = "fp8"
        assert chosen.kernel.name == name
        runs = [(name, chosen.run)]
        if rows == 1:
            fixed = choose_kernel(weight, bias, rows=rows, dtype=x.dtype, deterministic=True, **options)
            assert fixed is not None
            runs.append((fixed.kernel.name, fixed.run))
        expected = weight.matmul(x, bias).float()
        for name, run in runs:
            error = (run(x).float() - expected).abs().max() / expected.abs().max()
            assert error < (0.05 if case == "fp8 inputs" and name != "fp8" else 4e-3)  # inputs are not rounded


@pytest.mark.usefixtures("in_words")
def test_kernels_of_a_hopper_gpu() -> None:
    """Integers from 9 rows on, of large weights from one, and of larger ones with another kernel; groups of 32 up to 64
    rows; minima and more rows as elsewhere."""
    options: dict[str, Any] = dict(gated=False, whole=True, gluon=True, pdl=False, dtype=torch.bfloat16)

    def name(
        form: GroupForm,
        rows: int,
        *,
        shape: tuple[int, int] = (N, K),
        added: bool = False,
        deterministic: bool = False,
    ) -> str:
        form_of_row = groups.GroupFormat(form, columns=shape[1])
        weight = form_of_row.empty(shape, dtype=torch.bfloat16, device=torch.device("cpu"))
        chosen = choose_kernel(weight, None, rows=rows, added=added, deterministic=deterministic, **options)
        assert chosen is not None
        return chosen.kernel.name

    zeros = GroupForm(4, 128, zero=True)
    assert [name(zeros, rows) for rows in (8, 9, 2047, 2048)] == [
        *("packed_rows", "packed_wide", "packed_wide", "packed_dequantized")
    ]
    assert [name(zeros, rows, added=True) for rows in (9, 128, 129)] == [
        *("packed_wide_split_k", "packed_wide_split_k", "packed_wide")
    ]
    assert {name(GroupForm(bits, 64), rows) for bits in (4, 8) for rows in (16, 300)} == {"packed_wide"}
    assert [name(GroupForm(4, 32), rows) for rows in (64, 65)] == ["packed_wide", "packed_tiled"]
    assert name(zeros, 64, deterministic=True) == "packed_deterministic"
    assert name(GroupForm(4, 128, minimum=True), 64) == "packed_tiled"
    assert name(GroupForm(8, 0), 1) == "packed_rows"
    assert [name(zeros, rows, shape=(6144, 2048)) for rows in (1, 8)] == ["packed_wide", "packed_wide"]
    assert name(zeros, 8, shape=(2048, 12288), added=True) == "packed_wide_split_k"
    for form, most in ((zeros, 8), (GroupForm(4, 128), 8), (GroupForm(8, 0), 1)):
        assert {name(form, rows, shape=(6144, 4096)) for rows in (1, most)} == {"packed_at_once"}
        assert {name(form, rows, shape=(4096, 4096), added=True) for rows in (1, most)} == {"packed_at_once_split_k"}
        assert name(form, most + 1, shape=(6144, 4096)) == "packed_wide"
    assert name(GroupForm(8, 128), 1, shape=(6144, 4096)) == "packed_wide"
    assert name(zeros, 8, shape=(2048, 2048), added=True) == "packed_rows"  # too small, as the two after it
    assert name(zeros, 1, shape=(24576, 1024)) == name(zeros, 1, shape=(1024, 8192)) == "packed_rows"
    assert name(GroupForm(4, 64), 8, shape=(6144, 4096)) == "packed_rows"  # its numbers are scaled, not sums
    large = int8.Int8Format().empty((2048, 2048), dtype=torch.bfloat16, device=torch.device("cpu"))
    for rows, added, expected in ((1, False, "packed_wide"), (8, True, "packed_wide_split_k")):
        chosen = choose_kernel(large, None, rows=rows, added=added, deterministic=False, **options)
        assert chosen is not None and chosen.kernel.name == expected
    fixed = choose_kernel(large, None, rows=1, added=False, deterministic=True, **options)
    assert fixed is not None and fixed.kernel.name == "packed_deterministic"


@pytest.mark.usefixtures("in_words")
def test_row_scales_in_the_order_of_columns() -> None:
    """Experts, float32 activations and odd widths of `quantization="int8"`."""
    for shape, dtype in (((2, N, K), torch.float16), ((N, K), torch.float32), ((N, 100), torch.float16)):
        weight = int8.Int8Format().empty(shape, dtype=dtype, device=torch.device("cpu"))
        assert weight.format_name == "int8" and weight.kernel_arguments()["weight"].shape == shape


@pytest.mark.usefixtures("in_words")
def test_other_cases_have_no_kernel() -> None:
    ordered = groups.GroupFormat(GroupForm(4, 128, ordered=True), columns=K)
    weight = ordered.empty((N, K), dtype=torch.float16, device=torch.device("cpu"))
    options: dict[str, Any] = dict(rows=1, gated=False, added=False, whole=True, gluon=False, pdl=False)
    assert choose_kernel(weight, None, dtype=torch.float16, deterministic=False, **options) is None
    served = FORMATS["int4"].empty((N, K), dtype=torch.float16, device=torch.device("cpu"))
    assert packed_kernels_serve(served, served) and not packed_kernels_serve(served, weight)
    with pytest.raises(ConfigError, match="no deterministic kernel computes int4_groups"):
        choose_kernel(weight, None, dtype=torch.float16, deterministic=True, **options)
