"""The weights of the native step: each tensor as its file holds it, and its description for C (src/products.h)."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Index, Part, Stored
from nanovllm.weights.forms import GroupForm

TILE = 4  # rows of a packed weight that are interleaved
GROUP = 32  # columns that share a scale of the activations
DENSE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INT4, INT8, INT8_BY_16 = 3, 4, 5


class Matrix(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("half_scales", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class NativeWeight:
    """One tensor of a checkpoint; implements `Target`. Vectors become float32; dense matrices keep their type."""

    def __init__(self, library: ctypes.CDLL, *, packs: bool) -> None:
        """`packs`: a matrix that its file holds as integers with scales stays packed; otherwise it is dequantized."""
        self._library, self._packs = library, packs
        self._type = 0
        self.data = self.scales = torch.empty(0)
        self.minima: Tensor | None = None
        self.shape: tuple[int, ...] = ()

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        form = getattr(tensor, "form", None)
        self.shape = tuple(tensor.shape)
        if self._packs and len(self.shape) == 2 and isinstance(form, GroupForm):
            self._pack(tensor, form)
            return
        data = tensor.read(part).clone(memory_format=torch.contiguous_format)  # the file may be mapped
        self.data = data if len(self.shape) == 2 and data.dtype in DENSE else data.float()
        self._type = DENSE[self.data.dtype]

    def _pack(self, tensor: Any, form: GroupForm) -> None:
        rows, columns = self.shape
        sizes = form.sizes_in(columns)
        pieces = tensor.pieces((), sizes, torch.device("cpu"))
        codes = pieces.codes.contiguous()
        tiles = -(-rows // TILE)
        self.data = torch.empty(tiles * TILE, codes.shape[1], dtype=torch.uint8)
        self._library.pack_codes(pointer(codes), rows, columns, form.bits, pointer(self.data))
        scale, minimum = pieces.scale, pieces.minimum
        if form.unit_size:
            per_unit = sizes[1] // sizes[0]
            scale = scale.float() * pieces.scale_unit.float().repeat_interleave(per_unit, dim=-1)
            if minimum is not None:
                minimum = minimum.float() * pieces.minimum_unit.float().repeat_interleave(per_unit, dim=-1)
        elif form.bits == 4 and minimum is None:
            minimum = 8 * scale  # 8 stands for 0
            if not torch.isfinite(minimum).all():
                scale, minimum = scale.float(), 8 * scale.float()
        self.scales = in_tiles(scale)
        self.minima = None if minimum is None else in_tiles(minimum)
        self._type = INT4 if form.bits == 4 else INT8 if sizes[0] == GROUP else INT8_BY_16

    @property
    def is_packed(self) -> bool:
        return self._type >= INT4

    def matrix(self, bias: "NativeWeight | None" = None) -> Matrix:
        """Its description, valid as long as the weights exist."""
        rows, columns = self.shape
        return Matrix(
            type=self._type,
            rows=rows,
            columns=columns,
            half_scales=self.scales.dtype == torch.float16,
            data=pointer(self.data),
            scales=pointer(self.scales) if self.is_packed else None,
            minima=None if self.minima is None else pointer(self.minima),
            bias=None if bias is None else pointer(bias.data),
        )


def in_tiles(values: Tensor) -> Tensor:
    """[rows, groups] -> [tile, group, row of the tile]; missing rows of the last tile are 0."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -values.shape[0] % TILE))
    return padded.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
