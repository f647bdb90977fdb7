"""The weights of the native step: each tensor as its file holds it, and its description for C (src/products.h)."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.fp4 import NUMBERS as NUMBERS_OF_FP4
from nanovllm.checkpoint.packed.fp4 import Fp4Pieces, quantize_fp4
from nanovllm.checkpoint.packed.gguf import ReorderedColumns, scales_and_minima
from nanovllm.checkpoint.packed.gguf_types import FORMS
from nanovllm.checkpoint.packed.groups import Pieces, quantize_groups
from nanovllm.checkpoint.packed.int8 import Int8Tensor
from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.checkpoint.stored import Index, Part, Slot, Stored, Target
from nanovllm.layers.spec import TensorPart, Weight, norm_weight
from nanovllm.models.spec import ModelSpec
from nanovllm.native import GROUP
from nanovllm.native.blocks import IN_FILES, Blocks
from nanovllm.weights.forms import Form, Fp4Form, GroupForm
from nanovllm.weights.int8 import quantize_rows

TILE = 16  # rows of a matrix in memory are a multiple of this
DENSE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
PACKED = 3
NUMBERS = DENSE | {torch.int8: 3}  # the types of scales and minima
CPU = torch.device("cpu")
FP4_NUMBERS = torch.tensor([sign * int(2 * number) for sign in (1, -1) for number in NUMBERS_OF_FP4], dtype=torch.int8)
NUMBER, ADDRESS = ctypes.c_int, ctypes.c_void_p
PACKING: dict[str, tuple[Any, list[Any]]] = {  # of the functions that pack weights
    "pack": (None, [ADDRESS, *6 * [NUMBER], ADDRESS]),
    "pack_codes": (None, [ADDRESS, NUMBER, NUMBER, ctypes.POINTER(Blocks), ADDRESS]),
}


class Matrix(ctypes.Structure):
    _fields_ = (
        *((name, NUMBER) for name in ("type", "rows", "columns")),
        *((name, ADDRESS) for name in ("data", "bias")),
        *((name, NUMBER) for name in ("bits", "scale_type", "minimum_type", "groups_per_scale")),
        *((name, ADDRESS) for name in ("table", "scales", "minima")),
        ("groups_per_unit", NUMBER),
        ("units", ADDRESS),
    )


class NativeWeight:
    """One tensor of a checkpoint; implements `Target`. Vectors become float32; dense matrices keep their type."""

    def __init__(self, library: ctypes.CDLL, *, packs: bool, makes: Form | None = None) -> None:
        """`packs`: a matrix that its file holds as integers with scales stays packed; otherwise it is dequantized.

        `makes`: a matrix is rounded to this form: 4-bit groups, or 8 bits with one scale per row.
        """
        self._library, self._packs, self._makes = library, packs or makes is not None, makes
        self._type = self._bits = 0
        self._groups_per_scale = 1
        self.data = self.scales = torch.empty(0)
        self.minima: Tensor | None = None
        self.units: Tensor | None = None
        self._groups_per_unit = 1
        self._table: Tensor | None = None
        self.shape: tuple[int, ...] = ()

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        self.shape = part_shape(tensor, part)
        if self._makes is not None:
            tensor, part = made(self._makes, tensor.read(part)), ()
        if self._packs and isinstance(tensor, Int8Tensor):
            self._keep_rows(*tensor.pieces(part, CPU))
            return
        form: Form | None = getattr(tensor, "form", None) if self._packs and len(self.shape) == 2 else None
        kind = getattr(tensor, "type_name", None)
        if isinstance(form, GroupForm) and kind in IN_FILES:
            self._keep_blocks(cast(Any, tensor).blocks(part)[0], kind)
            if isinstance(tensor, ReorderedColumns):
                self._move_columns(tensor.order, form.unit_size)
            return
        if isinstance(form, GroupForm):
            sizes = form.sizes_in(self.shape[1])
            self._keep_pieces(cast(Any, tensor).pieces(part, sizes, CPU), form, sizes[0])
            return
        if isinstance(form, Fp4Form) and not form.has_unit:
            self._keep_fp4(cast(Any, tensor).pieces(part, GROUP, CPU))
            return
        data = tensor.read(part)
        if len(self.shape) == 2:
            self._keep_dense(data if data.dtype in DENSE else data.float())
        else:
            self.data = data.to(torch.float32, copy=True)  # the file may be mapped

    def _keep_dense(self, data: Tensor) -> None:
        self._type = DENSE[data.dtype]
        # in bfloat16 two columns lie side by side
        self.data = self._in_strips(data.contiguous()[:, None], size=2 if data.dtype == torch.float16 else 4, rows=TILE)

    def _keep_rows(self, codes: Tensor, scale: Tensor) -> None:
        self._keep_codes(codes, Blocks(GROUP, GROUP, 8, low_together=1), scale_columns=self.shape[1])
        self.scales = self._in_strips(scale.contiguous()[:, None, None])

    def _keep_codes(self, blocks: Tensor, layout: Blocks, *, scale_columns: int) -> None:
        """Store the codes of `blocks`, contiguous for each row. `scale_columns`: columns that share a scale."""
        rows, columns = self.shape
        self._type, self._bits, self._groups_per_scale = PACKED, layout.bits, scale_columns // GROUP
        blocks, count = blocks.contiguous(), columns // layout.columns
        self.data = _rows_in_tiles(rows, columns * layout.bits // 8, torch.uint8)
        self._library.pack_codes(pointer(blocks), rows, count, ctypes.byref(layout), pointer(self.data))

    def _in_strips(self, values: Tensor, *, size: int = 0, rows: int = 0) -> Tensor:
        """[rows, groups, numbers] -> strips, see `pack` in src/products.h; missing rows of the last tile are 0.

        `size`: bytes that stay together; 0 = those of a number. `rows`: of a strip; 0 = those of packed matrices.
        """
        num_rows, groups, count = values.shape
        found = _rows_in_tiles(num_rows, groups * count, values.dtype)
        size, stride = size or values.itemsize, values.stride(1) * values.itemsize
        sizes = (num_rows, groups, stride, count * values.itemsize // size, size, rows or self._library.rows_of_strip())
        self._library.pack(pointer(values), *sizes, pointer(found))
        return found

    def _keep_blocks(self, blocks: Tensor, kind: str) -> None:
        """Store codes and scales of blocks of a GGUF type, [rows, blocks, bytes]."""
        form, blocks = FORMS[kind], blocks.contiguous()
        self._groups_per_unit = form.unit_size // GROUP
        self._keep_codes(blocks, IN_FILES[kind], scale_columns=form.group_size)
        if kind == "Q6_K":
            self.scales = self._in_strips(blocks[..., 192:208]).view(torch.int8)
            self.units = self._halves(blocks[..., 208:])
        elif form.unit_size:
            scales, minima = scales_and_minima(blocks)
            self.scales, self.minima = (self._in_strips(each).view(torch.int8) for each in (scales, minima))
            self.units = self._halves(blocks[..., :4])
        else:
            self.scales = self._halves(blocks[..., :2])
            if form.minimum:  # what the file adds, a minimum subtracts
                self.minima = self._halves(blocks[..., 2:4]).neg_()

    def _move_columns(self, order: Sequence[int], unit_size: int) -> None:
        """Reorder the stored columns: block `order[i]` moves to i. Afterwards a unit covers `unit_size` columns."""
        num_strips = self.data.shape[0] // self._library.rows_of_strip()

        def moved(values: Tensor) -> Tensor:
            """A strip's values for one block of columns are contiguous."""
            return values.view(num_strips, len(order), -1)[:, torch.tensor(order)].view_as(values)

        self.data, self.scales = moved(self.data), moved(self.scales)
        if self.minima is not None:
            self.minima = moved(self.minima)
        if self.units is not None:
            units = self.units.view(num_strips, self.shape[1] // (GROUP * self._groups_per_unit), -1)
            self._groups_per_unit = unit_size // GROUP
            per_block = units.repeat_interleave(self.shape[1] // unit_size // units.shape[1], dim=1)
            self.units = moved(per_block.view(self.data.shape[0], -1))

    def _halves(self, numbers: Tensor) -> Tensor:
        """Numbers in float16, in strips; raises ValueError unless all are finite."""
        found = self._in_strips(numbers, size=2).view(torch.float16)
        if (found.view(torch.int16) & 0x7C00).max() == 0x7C00:  # a tenth of the time that torch.isfinite takes
            raise ValueError("a scale is infinite or NaN")
        return found

    def _keep_pieces(self, pieces: Pieces, form: GroupForm, scale_columns: int) -> None:
        self._keep_codes(
            pieces.codes, Blocks(GROUP, GROUP * form.bits // 8, form.bits, low_together=1), scale_columns=scale_columns
        )
        scale = pieces.scale if pieces.scale.dtype == torch.float16 else pieces.scale.float()
        self.scales = self._in_strips(scale.contiguous()[:, None])
        if pieces.zero is not None:
            self.minima = self._in_strips(pieces.zero.view(torch.int8).contiguous()[:, None])

    def _keep_fp4(self, pieces: Fp4Pieces) -> None:
        """Store MXFP4 codes. The table holds twice their values, so that these are integers; the scales are halved."""
        self._keep_codes(pieces.codes, Blocks(GROUP, GROUP // 2, 4, low_together=1), scale_columns=GROUP)
        scale = pieces.scale.view(torch.float8_e8m0fnu).float() / 2
        exact = scale.half() if torch.equal(scale.half().float(), scale) else scale
        self.scales = self._in_strips(exact.contiguous()[:, None])
        self._table = FP4_NUMBERS

    @property
    def is_packed(self) -> bool:
        return self._type == PACKED

    def matrix(self, bias: "NativeWeight | None" = None) -> Matrix:
        """Its description, valid as long as the weights exist."""
        rows, columns = self.shape
        found = Matrix(type=self._type, rows=rows, columns=columns, data=pointer(self.data))
        if bias is not None:
            found.bias = pointer(bias.data)
        if not self.is_packed:
            return found
        found.bits, found.groups_per_scale = self._bits, self._groups_per_scale
        found.scales, found.scale_type = pointer(self.scales), NUMBERS[self.scales.dtype]
        if self.minima is not None:
            found.minima, found.minimum_type = pointer(self.minima), NUMBERS[self.minima.dtype]
        if self.units is not None:
            found.units, found.groups_per_unit = pointer(self.units), self._groups_per_unit
        if self._table is not None:
            found.table = pointer(self._table)
        return found


class Divided:
    """Weights that a checkpoint has as one tensor; implements `Target`. Index (i,) is the weight number i."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        number = index[0]
        assert isinstance(number, int)
        self._targets[number].load((), tensor, part)


def named_parts(prefix: str, weight: Weight) -> list[tuple[str, TensorPart]]:
    """The parts of a weight, each with a name: its tensor's, and a number where one tensor has several."""
    parts = list(weight.parts(0, 1))
    tensors = [part.name for part in parts]
    numbers = [f"[{tensors[:i].count(name)}]" if tensors.count(name) > 1 else "" for i, name in enumerate(tensors)]
    return [(prefix + part.name + number, part) for part, number in zip(parts, numbers, strict=True)]


def native_slots(spec: ModelSpec, target_of: Callable[[str, str, Weight], Target]) -> dict[str, Slot]:
    """Where every tensor of a checkpoint goes, by its Hugging Face name. `target_of`: from the prefix of a weight, the
    name of one of its parts, and the weight."""
    last_norm = norm_weight(spec.hidden_size, spec.norm_offset)
    weights = [("", spec.embedding_weight()), ("model.norm.", last_norm)]
    if not spec.tie_word_embeddings:
        weights.append(("", spec.head_weight()))
    for index, layer in enumerate(spec.layers):
        weights += [(f"model.layers.{index}.{prefix}", weight) for prefix, weight in layer.weights()]
    if spec.per_layer is not None:
        weights += spec.per_layer.weights()
    found: dict[str, Slot] = {}
    for prefix, weight in weights:
        held: dict[str, list[tuple[Target, TensorPart]]] = {}
        for name, part in named_parts(prefix, weight):
            held.setdefault(prefix + part.name, []).append((target_of(prefix, name, weight), part))
        for name, parts in held.items():
            targets, own = [target for target, _ in parts], parts[0][1]
            places = tuple(((number,), part.part) for number, (_, part) in enumerate(parts))
            target = targets[0] if len(targets) == 1 else Divided(targets)
            found[name] = Slot(target, own.shape, places, own.order, weight.offset)
    return found


def part_shape(tensor: Stored, part: Part) -> tuple[int, ...]:
    sizes = [len(range(*own.indices(size))) for own, size in zip(part, tensor.shape, strict=False)]
    return (*sizes, *tensor.shape[len(sizes) :])


def made(form: Form, weight: Tensor) -> Any:
    """A dense matrix rounded to a packed form."""
    if isinstance(form, GroupForm):
        return quantize_groups(weight, form.dividing(weight.shape[1]))
    if isinstance(form, Fp4Form):
        return quantize_fp4(weight, form)
    codes, scale = quantize_rows(weight)
    if not torch.isfinite(scale).all():
        raise ValueError("a row holds NaN or infinity, which 8-bit weights cannot represent")
    return Int8Tensor(InMemory(codes), InMemory(scale))


def _rows_in_tiles(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """[rows, size], with rows of zeros up to a whole tile."""
    make = torch.empty if rows % TILE == 0 else torch.zeros
    return make(-(-rows // TILE) * TILE, size, dtype=dtype)


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
