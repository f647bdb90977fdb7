"""Products in C against torch: every format, odd sizes, and the same bits for any number of rows."""

import ctypes
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.checkpoint.gguf_header import BLOCKS
from nanovllm.checkpoint.packed.fp4 import quantize_fp4
from nanovllm.checkpoint.packed.gguf import ReorderedColumns, unpack_blocks
from nanovllm.checkpoint.packed.gguf_types import FORMS
from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.native.build import library
from nanovllm.native.formats import Products, ProductWeight
from nanovllm.native.weights import GROUP, TILE, Matrix, NativeWeight, pointer
from nanovllm.runner.native_plan import CountedWeight
from nanovllm.weights.forms import Fp4Form
from tests.native.planned import bytes_of
from tests.weights.test_gguf_groups import random_blocks

LIBRARY = library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no native library on this machine")
MOST_ROWS, PANEL = 64, 192  # src/products.h
LANES = LIBRARY.rows_of_strip() if LIBRARY is not None else 4
DENSE = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [*FORMS, "MXFP4"]
INFINITE = [("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2), ("Q8_0", 0), ("Q5_K", 2), ("Q6_K", 208)]  # where a float16 number is


class Rounded(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_int8 * GROUP * LANES),
        ("scales", ctypes.c_float * LANES),
        ("minus_sums", ctypes.c_float * LANES),
        *([("zeros", ctypes.c_int32 * LANES * 2)] if platform.machine() == "x86_64" else []),
    )


class Inputs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rounded", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("num_parts", ctypes.c_int),
    )


class Place(ctypes.Structure):
    _fields_ = (("w", ctypes.POINTER(Matrix)), ("tile", ctypes.c_int))


class Panels(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_float * (2 * PANEL * TILE)),
        ("current", ctypes.c_int),
        ("held", ctypes.c_void_p),
    )


@dataclass
class Blocks:
    """A tensor of a GGUF file."""

    type_name: str
    raw: np.ndarray
    shape: tuple[int, int]

    @property
    def form(self) -> Any:
        return FORMS[self.type_name]

    def read(self, part: Any = ()) -> Tensor:
        return torch.from_numpy(dequantize(self.raw, GGMLQuantizationType[self.type_name]))

    def blocks(self, part: Any) -> tuple[Tensor, range]:
        raw = torch.from_numpy(self.raw).view(self.shape[0], -1, BLOCKS[self.type_name][1])
        return raw, range(self.shape[1])

    def pieces(self, part: Any, sizes: tuple[int, int], device: torch.device) -> Any:
        return unpack_blocks(self.blocks(part)[0], self.type_name)


def packed(kind: str, rows: int, columns: int) -> Any:
    """A random matrix; implements `Stored`."""
    if kind == "MXFP4":
        return quantize_fp4(torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)), Fp4Form(32))
    return blocks(kind, rows, columns)


def blocks(kind: str, rows: int, columns: int) -> Blocks:
    return Blocks(kind, random_blocks(kind, (rows, columns), 0.0005 if "K" in kind else 0.01), (rows, columns))


def loaded(tensor: Any, *, packs: bool = True) -> NativeWeight:
    assert LIBRARY is not None
    weight = NativeWeight(LIBRARY, packs=packs)
    weight.load((), tensor, ())
    return weight


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and one scale for each group of 32, as the definition has them."""
    groups = x.unflatten(-1, (-1, GROUP))
    size = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.full_like(size, 127.0) / size  # a number divided by a tensor is rounded twice
    codes = (groups * torch.where(size > 0, inverse, 0.0)).round()
    return codes.flatten(-2).to(torch.int8), (size / 127.0).squeeze(-1)


def multiply(
    weight: NativeWeight, x: Tensor, *, at_once: int = MOST_ROWS, num_tiles: int = 2, num_parts: int = 3
) -> Tensor:
    """x W^T by tiles, `at_once` rows of x and one or two tiles together."""
    return torch.cat([_multiply(weight, rows, num_tiles, num_parts) for rows in x.split(at_once)])


def _multiply(weight: NativeWeight, x: Tensor, num_tiles: int, num_parts: int) -> Tensor:
    assert LIBRARY is not None
    (rows, columns), (outputs, _) = x.shape, weight.shape
    groups = columns // GROUP if weight.is_packed else 0
    rounded = (Rounded * (-(-rows // LANES) * groups))()
    for row in range(rows if groups else 0):
        block = ctypes.byref(rounded, row // LANES * groups * ctypes.sizeof(Rounded))
        LIBRARY.round_row(pointer(x[row]), columns, block, row % LANES)
    matrix = ctypes.pointer(weight.matrix())
    parts = torch.empty(-(-rows // 16) * 16, num_parts * columns, dtype=torch.bfloat16)
    for row in range(rows if LIBRARY.uses_amx(matrix) else 0):
        LIBRARY.split_row(pointer(x[row]), 0, columns, columns, pointer(parts), num_parts, row)
    inputs = Inputs(x.data_ptr(), ctypes.addressof(rounded), parts.data_ptr(), rows, columns, num_parts)
    y = torch.empty(rows, -(-outputs // TILE) * TILE)
    places = [Place(matrix, tile) for tile in range(y.shape[1] // TILE)]
    panels = Panels()
    for first in range(0, len(places), num_tiles):
        here = places[first : first + num_tiles]
        after = places[(first + len(here)) % len(places)]
        outs = torch.empty(len(here), MOST_ROWS, TILE)
        rest = ctypes.byref(inputs), 0, rows, ctypes.byref(panels), pointer(outs)
        LIBRARY.product_tiles((Place * len(here))(*here), len(here), after, *rest)
        for place, out in zip(here, outs, strict=True):
            y[:, place.tile * TILE : (place.tile + 1) * TILE] = out[:rows]
    return y[:, :outputs]


@settings(max_examples=min(20, settings().max_examples))
@given(rows=st.integers(1, 18), outputs=st.integers(1, 37), size=st.integers(1, 3), seed=st.integers(0, 1000))
@pytest.mark.parametrize("kind", KINDS)
def test_packed_products(kind: str, rows: int, outputs: int, size: int, seed: int) -> None:
    columns = size * max(BLOCKS[kind][0], 64)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    tensor = packed(kind, outputs, columns)
    weight = loaded(tensor)
    assert weight.is_packed
    codes, scales = rounded(x)
    exact = codes.double() * scales.double().repeat_interleave(GROUP, dim=-1)
    expected = exact @ tensor.read().double().T
    y = multiply(weight, x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    for at_once in (1, 2, 3, 4):
        assert torch.equal(multiply(weight, x, at_once=at_once), y)


@settings(max_examples=min(20, settings().max_examples))
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 70),
    size=st.one_of(st.integers(1, 50), st.sampled_from([96, 144, 193])),  # 192 columns are a panel
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("dtype", DENSE)
def test_dense_products(dtype: torch.dtype, rows: int, outputs: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, matrix = (torch.randn(count, 4 * size, generator=generator) for count in (rows, outputs))
    weight = loaded(InMemory(matrix.to(dtype)))
    assert weight.data.dtype == dtype
    y = multiply(weight, x)
    torch.testing.assert_close(y.double(), x.double() @ matrix.to(dtype).double().T, rtol=1e-5, atol=1e-4)
    for at_once in (1, 2, 3, 4, 7):
        assert torch.equal(multiply(weight, x, at_once=at_once), y)
    assert torch.equal(multiply(weight, x, num_tiles=1), y)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
def test_inputs_rounded_to_bfloat16(rows: int) -> None:
    """One part instead of three, where there is a matrix unit; elsewhere products are exact anyway."""
    assert LIBRARY is not None
    generator = torch.Generator().manual_seed(rows)
    x, matrix = (torch.randn(count, 96, generator=generator) for count in (rows, 70))
    weight = loaded(InMemory(matrix.bfloat16()))
    inputs = x.bfloat16() if LIBRARY.uses_amx(ctypes.byref(weight.matrix())) else x
    y = multiply(weight, x, num_parts=1)
    torch.testing.assert_close(y.double(), inputs.double() @ matrix.bfloat16().double().T, rtol=1e-5, atol=1e-4)
    for at_once in (1, 3, 16):
        assert torch.equal(multiply(weight, x, at_once=at_once, num_parts=1), y)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_packed_matrix_are_those_of_the_file(kind: str) -> None:
    """As the embedding reads them; and in exact arithmetic the whole matrix is dequantized."""
    assert LIBRARY is not None
    tensor = packed(kind, 7, 512)
    weight, exact = loaded(tensor), loaded(tensor, packs=False)
    assert not exact.is_packed
    row = torch.empty(512)
    for index in range(7):
        LIBRARY.matrix_row(ctypes.byref(weight.matrix()), index, pointer(row))
        torch.testing.assert_close(row, tensor.read()[index], rtol=1e-6, atol=1e-7)
        LIBRARY.matrix_row(ctypes.byref(exact.matrix()), index, pointer(row))
        assert torch.equal(row, tensor.read()[index])


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("size", [32, 128, 256])
def test_columns_in_another_order(kind: str, size: int) -> None:
    """As Qwen3.5's out_proj has them; the units of K types are then of fewer columns."""
    stored = blocks(kind, 21, 768)
    order = torch.randperm(768 // size, generator=torch.Generator().manual_seed(size)).tolist()
    tensor = ReorderedColumns(stored, order, size)
    weight = loaded(tensor)
    x = torch.randn(9, 768, generator=torch.Generator().manual_seed(0))
    codes, scales = rounded(x)
    exact = codes.double() * scales.double().repeat_interleave(GROUP, dim=-1)
    expected = exact @ tensor.read().double().T
    assert weight.is_packed
    counted = CountedWeight(packs=True, makes=None)
    counted.load((), tensor, ())
    assert counted.num_bytes == bytes_of(weight)
    y = multiply(weight, x).double()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("kind", "first"), INFINITE)
def test_blocks_with_infinite_scales_are_refused(kind: str, first: int, number: float) -> None:
    tensor = blocks(kind, 5, max(BLOCKS[kind][0], 64))
    tensor.raw[4, first : first + 2] = np.array([number], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="infinite or NaN"):
        loaded(tensor)


def test_activations_are_rounded_to_the_nearest_code() -> None:
    assert LIBRARY is not None
    x = torch.randn(96, generator=torch.Generator().manual_seed(0))
    x[32:64] = 0.0
    groups = (Rounded * 3)()
    LIBRARY.round_row(pointer(x), 96, groups, 2)
    codes = torch.tensor([list(group.codes[2]) for group in groups], dtype=torch.int8)  # [3, 32]
    scales, minus_sums = (
        torch.tensor([getattr(group, name)[2] for group in groups]) for name in ("scales", "minus_sums")
    )
    expected_codes, expected_scales = rounded(x)
    assert torch.equal(codes.flatten(), expected_codes) and torch.equal(scales, expected_scales)
    torch.testing.assert_close(minus_sums, -codes.float().sum(dim=-1) * scales)


def test_matrices_one_below_the_other() -> None:
    """For more rows of x than are multiplied at a time, and more matrices: the bits of each by itself."""
    assert LIBRARY is not None
    generator = torch.Generator().manual_seed(0)
    dense = [
        InMemory(torch.randn(rows, 256, generator=generator).to(dtype))
        for rows, dtype in zip((7, 16), DENSE, strict=False)
    ]
    parts = [packed("Q4_K", 20, 256), dense[0], packed("MXFP4", 33, 256), dense[1], packed("Q6_K", 5, 256)]
    products = Products(LIBRARY, 2)
    products.reserve(256)
    weight = ProductWeight(products, (81, 256), lambda: NativeWeight(LIBRARY, packs=True))
    first = 0
    for part in parts:
        weight.load((slice(first, first + part.shape[0]),), part, ())
        first += part.shape[0]
    x = torch.randn(300, 256, generator=generator)
    expected = torch.cat([multiply(loaded(part), x) for part in parts], dim=1)
    assert torch.equal(weight.matmul(x), expected)
    residual, bias = torch.randn(300, 81, generator=generator), torch.randn(81, generator=generator)
    assert torch.equal(weight.matmul_add(x, residual.clone(), bias), residual + expected + bias)
    assert weight.matmul(x[:0]).shape == (0, 81)
    rows = weight.dequantized()
    assert torch.equal(rows[20:27], dense[0].tensor) and torch.equal(rows[60:76], dense[1].tensor.float())
    products.close()
