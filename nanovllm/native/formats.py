"""Weights that layers of torch hold as the file does, and multiply by the native library.

For models that the native step does not compute: torch computes what is between the products.
"""

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Index, Part, Stored
from nanovllm.layers.spec import Weight
from nanovllm.native import GROUP
from nanovllm.native.build import declare
from nanovllm.native.support import Makes, fits, forms_of
from nanovllm.native.weights import ADDRESS, NUMBER, PACKING, Matrix, NativeWeight, pointer
from nanovllm.weights.format import StoredWeight, WeightFormat
from nanovllm.weights.formats import WeightFormats
from nanovllm.weights.forms import Form, Packing

DENSE_MULTIPLE, PACKED_MULTIPLE = 4, GROUP  # which the number of columns has to be

SIGNATURES = PACKING | {
    "engine_for_products": (ADDRESS, [NUMBER, NUMBER]),
    "engine_products": (None, [ADDRESS, ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, NUMBER]),
    "engine_destroy": (None, [ADDRESS]),
    "matrix_rows": (None, [ADDRESS, ADDRESS, ctypes.c_int64, ADDRESS]),
}


class Products:
    """The threads that multiply. `close` ends them."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.library, self._num_threads = declare(library, SIGNATURES), num_threads
        self._columns = 0  # most of all weights
        self._engine: Any = None
        self.close: Callable[[], Any] = lambda: None

    def reserve(self, columns: int) -> None:
        """For a weight with so many columns. Called before the first product."""
        assert self._engine is None
        self._columns = max(self._columns, columns)

    def run(self, matrices: "ctypes.Array[Matrix]", x: Tensor, out: Tensor, *, adds: bool) -> None:
        """out = x W^T, or added to it. [rows, columns] -> [rows, rows of all matrices], contiguous float32."""
        arguments = (matrices, len(matrices), x.data_ptr(), x.shape[0], out.data_ptr(), adds)
        self.library.engine_products(self.engine, *arguments)

    @property
    def engine(self) -> int:
        """Its address. Started when it is first needed."""
        if self._engine is None:
            self._start()
        return self._engine

    def _start(self) -> None:
        self._engine = self.library.engine_for_products(self._columns, self._num_threads)
        if not self._engine:
            raise MemoryError("no memory for the inputs of native products")
        self.close = weakref.finalize(self, self.library.engine_destroy, self._engine)


class ProductWeight:
    """One weight, [out, in] or [experts, out, in]; implements `StoredWeight`. Each of its tensors is a matrix."""

    format_name = "native"

    def __init__(self, products: Products, shape: tuple[int, ...], make: Callable[[], NativeWeight]) -> None:
        """`make`: an empty matrix."""
        self.shape = shape
        self._products, self._make = products, make
        self.parts: dict[int, dict[int, NativeWeight]] = {}  # of each expert, by their first rows
        self._matrices: dict[int, ctypes.Array[Matrix]] = {}  # of each expert

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        expert, rows = index if len(index) > 1 else (0, *index)
        assert isinstance(expert, int) and isinstance(rows, slice)
        own = self._make()
        own.load((), tensor, part)
        self.parts.setdefault(expert, {})[rows.start] = own
        self._matrices.pop(expert, None)

    def finish_loading(self) -> None:
        """Read as it was loaded."""

    def _of(self, expert: int | None) -> "ctypes.Array[Matrix]":
        found = self._matrices.get(expert or 0)
        if found is None:
            parts = [weight.matrix() for _, weight in sorted(self.parts[expert or 0].items())]
            found = self._matrices[expert or 0] = (Matrix * len(parts))(*parts)
        return found

    def dequantized(self, expert: int | None = None) -> Tensor:
        experts = range(self.shape[0]) if expert is None and len(self.shape) == 3 else (expert or 0,)
        found = [self._rows(part, torch.arange(part.rows)) for one in experts for part in self._of(one)]
        return torch.cat(found).view(self.shape if expert is None else self.shape[1:])

    def embed(self, token_ids: Tensor) -> Tensor:
        (table,) = self._of(None)
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < table.rows:
            raise IndexError(f"a token id is not below {table.rows}")
        return self._rows(table, token_ids)

    def _rows(self, matrix: Matrix, rows: Tensor) -> Tensor:
        rows = rows.long().contiguous()
        out = torch.empty(*rows.shape, matrix.columns)
        self._products.library.matrix_rows(ctypes.byref(matrix), pointer(rows), rows.numel(), pointer(out))
        return out

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        out = torch.empty(*x.shape[:-1], self.shape[-2])
        self._multiply(x, out, expert, adds=False)
        return out if bias is None else out.add_(bias)

    def matmul_add(self, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + x W^T + bias; `residual` is overwritten."""
        out = residual.contiguous()
        self._multiply(x, out, None, adds=True)
        return out if bias is None else out.add_(bias)

    def _multiply(self, x: Tensor, out: Tensor, expert: int | None, *, adds: bool) -> None:
        assert x.dtype == out.dtype == torch.float32 and x.shape[-1] == self.shape[-1]
        self._products.run(self._of(expert), x.reshape(-1, x.shape[-1]).contiguous(), out, adds=adds)

    def kernel_arguments(self) -> dict[str, Any]:
        raise NotImplementedError("no kernel reads weights of the native library")


@dataclass
class ProductFormat:
    products: Products
    packs: bool
    makes: Form | None
    name: str = "native"

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Of dense weights. How many bytes those of a file take says native_plan.py."""
        return math.prod(shape) * itemsize

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> StoredWeight:
        self.products.reserve(shape[-1])
        library = self.products.library
        return ProductWeight(self.products, shape, lambda: NativeWeight(library, packs=self.packs, makes=self.makes))


@dataclass(frozen=True, kw_only=True)
class NativeFormats(WeightFormats):
    """`made`, `packing`, `quantizes`: for weights that the library does not multiply."""

    products: Products
    stored: Packing | None  # as the checkpoint is packed
    packs: bool  # weights that the file holds packed stay packed
    makes: Makes  # what a weight is rounded to while loading

    def of(self, prefix: str, weight: Weight, num_ranks: int = 1) -> WeightFormat:
        if multiplies(prefix, weight, self.stored if self.packs else None, self.makes):
            return ProductFormat(self.products, self.packs, self.makes(prefix, weight))
        return super().of(prefix, weight, num_ranks)


def multiplies(prefix: str, weight: Weight, packing: Packing | None, makes: Makes) -> bool:
    """Whether the library multiplies this weight, or reads rows of it. `packing`: in which it stays."""
    if weight.columns is None or not (weight.packable or weight.names[0].startswith("model.embed_tokens")):
        return False
    columns, made = weight.columns.size, makes(prefix, weight)
    forms = {made} if made is not None else forms_of(packing, prefix, weight)
    if not forms:
        return columns % DENSE_MULTIPLE == 0
    return columns % PACKED_MULTIPLE == 0 and all(fits(form, columns) for form in forms)
