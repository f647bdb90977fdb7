"""The weights of the native step: each tensor as its file holds it, and its description for C (src/products.h)."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.fp4 import Fp4Pieces, quantize_fp4
from nanovllm.checkpoint.packed.groups import Pieces, quantize_groups
from nanovllm.checkpoint.packed.int8 import Int8Tensor
from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.checkpoint.stored import Index, Part, Slot, Stored, Target
from nanovllm.layers.spec import TensorPart, Weight, norm_weight
from nanovllm.models.spec import ModelSpec
from nanovllm.native import GROUP
from nanovllm.weights.forms import Form, Fp4Form, GroupForm
from nanovllm.weights.int8 import quantize_rows

TILE = 16  # rows of a matrix in memory are a multiple of this
DENSE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INT4, INT8, INT8_BY_16, FP4 = 3, 4, 5, 6
IN_STRIP_ORDER = ("Q4_0", "Q4_1", "Q8_0")  # GGUF types whose blocks have the codes in the order of a strip
CPU = torch.device("cpu")
NUMBER, ADDRESS = ctypes.c_int, ctypes.c_void_p
PACKING: dict[str, tuple[Any, list[Any]]] = {  # of the functions that pack weights
    "pack": (None, [ADDRESS, *6 * [NUMBER], ADDRESS]),
    "order_halves": (None, [ADDRESS, ctypes.c_int64, ADDRESS]),
}


class Matrix(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("half_scales", ctypes.c_int32),
        ("groups_per_scale", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class NativeWeight:
    """One tensor of a checkpoint; implements `Target`. Vectors become float32; dense matrices keep their type."""

    def __init__(self, library: ctypes.CDLL, *, packs: bool, makes: Form | None = None) -> None:
        """`packs`: a matrix that its file holds as integers with scales stays packed; otherwise it is dequantized.

        `makes`: a matrix is rounded to this form: 4-bit groups, or 8 bits with one scale per row.
        """
        self._library, self._packs, self._makes = library, packs or makes is not None, makes
        self._type = 0
        self._groups_per_scale = 1
        self.data = self.scales = torch.empty(0)
        self.minima: Tensor | None = None
        self.shape: tuple[int, ...] = ()

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        self.shape = part_shape(tensor, part)
        if self._makes is not None:
            tensor, part = made(self._makes, tensor.read(part)), ()
        if self._packs and isinstance(tensor, Int8Tensor):
            self._keep_rows(*tensor.pieces(part, CPU))
            return
        form: Form | None = getattr(tensor, "form", None) if self._packs and len(self.shape) == 2 else None
        if isinstance(form, GroupForm):
            self._keep_groups(tensor, part)
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
        self._store_codes(codes, bits=8)
        self.scales = self._in_strips(scale.contiguous()[:, None, None])
        self._type, self._groups_per_scale = INT8, self.shape[1] // GROUP

    def _store_codes(self, codes: Tensor, bits: int) -> None:
        codes = codes.contiguous()
        if bits == 4:
            ordered = torch.empty_like(codes)
            self._library.order_halves(pointer(codes), self.shape[0] * (self.shape[1] // GROUP), pointer(ordered))
            codes = ordered
        self.data = self._in_strips(codes.view(torch.uint8).view(self.shape[0], 1, -1), size=4)

    def _in_strips(self, values: Tensor, *, size: int = 0, rows: int = 0) -> Tensor:
        """[rows, groups, numbers] -> strips, see `pack` in src/products.h; missing rows of the last tile are 0.

        `size`: bytes that stay together; 0 = those of a number. `rows`: of a strip; 0 = those of packed matrices.
        """
        num_rows, groups, count = values.shape
        make = torch.empty if num_rows % TILE == 0 else torch.zeros
        found = make(-(-num_rows // TILE) * TILE, groups * count, dtype=values.dtype)
        size, stride = size or values.itemsize, values.stride(1) * values.itemsize
        sizes = (num_rows, groups, stride, count * values.itemsize // size, size, rows or self._library.rows_of_strip())
        self._library.pack(pointer(values), *sizes, pointer(found))
        return found

    def _keep_groups(self, tensor: Any, part: Part) -> None:
        form: GroupForm = tensor.form
        sizes = form.sizes_in(self.shape[1])
        if getattr(tensor, "type_name", None) in IN_STRIP_ORDER:
            scale, minimum = self._store_blocks(tensor.blocks(part)[0], form)
        else:
            scale, minimum = self._store_pieces(tensor.pieces(part, sizes, CPU), form, sizes)
        if form.bits == 4 and minimum is None:
            minimum = 8 * scale  # 8 stands for 0
            if not torch.isfinite(minimum).all():
                scale, minimum = scale.float(), 8 * scale.float()
        self.scales, self.minima = scale, minimum
        self._type = INT4 if form.bits == 4 else INT8 if sizes[0] % GROUP == 0 else INT8_BY_16
        self._groups_per_scale = max(sizes[0] // GROUP, 1)

    def _store_blocks(self, blocks: Tensor, form: GroupForm) -> tuple[Tensor, Tensor | None]:
        """Store the codes of a file's blocks, and return scales and minima in strips."""
        blocks = blocks.contiguous()  # [rows, groups, bytes]: the scale, maybe the minimum, the codes
        self.data = self._in_strips(blocks[..., 4 if form.minimum else 2 :], size=4)
        scale = self._in_strips(blocks[..., :2], size=2).view(torch.float16)
        # what the file adds, a minimum subtracts
        minimum = self._in_strips(blocks[..., 2:4], size=2).view(torch.float16).neg_() if form.minimum else None
        if not all(map(all_finite, (scale,) if minimum is None else (scale, minimum))):
            raise ValueError("a scale is infinite or NaN")
        return scale, minimum

    def _store_pieces(self, pieces: Pieces, form: GroupForm, sizes: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Store the codes, and return scales and minima in strips. `sizes`: columns per scale and per unit."""
        self._store_codes(pieces.codes, form.bits)
        scale, minimum = pieces.scale, pieces.minimum
        if scale.dtype != torch.float16:
            scale = scale.float()
        if form.unit_size:
            assert pieces.scale_unit is not None
            per_unit = sizes[1] // sizes[0]
            scale = scale.float() * pieces.scale_unit.float().repeat_interleave(per_unit, dim=-1)
            if minimum is not None:
                assert pieces.minimum_unit is not None
                minimum = minimum.float() * pieces.minimum_unit.float().repeat_interleave(per_unit, dim=-1)
        elif pieces.zero is not None:
            scale = scale.float()
            minimum = scale * pieces.zero.float()
        scale = self._in_strips(scale.contiguous()[:, None])
        return scale, None if minimum is None else self._in_strips(minimum.contiguous()[:, None])

    def _keep_fp4(self, pieces: Fp4Pieces) -> None:
        """MXFP4. The codes stand for twice the numbers, and the scales are halved."""
        self._store_codes(pieces.codes, bits=4)
        scale = pieces.scale.view(torch.float8_e8m0fnu).float() / 2
        exact = scale.half() if torch.equal(scale.half().float(), scale) else scale
        self.scales = self._in_strips(exact.contiguous()[:, None])
        self._type = FP4

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
            groups_per_scale=self._groups_per_scale,
            data=pointer(self.data),
            scales=pointer(self.scales) if self.is_packed else None,
            minima=None if self.minima is None else pointer(self.minima),
            bias=None if bias is None else pointer(bias.data),
        )


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


def all_finite(halves: Tensor) -> bool:
    """In float16. A tenth of the time that torch.isfinite takes."""
    return int((halves.view(torch.int16) & 0x7C00).max()) < 0x7C00


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
