"""Bytes of the native step's weights, or of torch's layers with native products.

From the headers of a checkpoint and, for its dtype, one row of each matrix.
"""

import math
from pathlib import Path
from typing import Any

import torch

from nanovllm.checkpoint.loader import load_checkpoint
from nanovllm.checkpoint.packed.int8 import Int8Tensor
from nanovllm.checkpoint.stored import Index, Part, Slot, Stored, Target, slots_of
from nanovllm.config import Config
from nanovllm.layers.spec import Weight
from nanovllm.models.parameters import num_bytes, tensor_names
from nanovllm.models.shard import whole_model
from nanovllm.models.spec import ModelSpec
from nanovllm.native import GROUP
from nanovllm.native.blocks import row_bytes
from nanovllm.native.formats import multiplies
from nanovllm.native.support import FORMS_MADE, forms_to_make, keeps_packed
from nanovllm.native.weights import DENSE, TILE, native_slots, part_shape
from nanovllm.weights.formats import weight_formats
from nanovllm.weights.forms import Form, Fp4Form, GroupForm, Int8Form


class CountedWeight:
    """The bytes of tensors as `NativeWeight`s; implements `Target`."""

    def __init__(self, *, packs: bool, makes: Form | None) -> None:
        self._packs, self._makes = packs, makes
        self.num_bytes = 0

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        shape = part_shape(tensor, part)
        if len(shape) != 2:
            self.num_bytes += math.prod(shape) * 4
            return
        rows, columns = shape
        form = self._form_of(tensor)
        if form is None:
            self.num_bytes += _up_to(rows, TILE) * columns * _item_bytes(tensor)
        elif isinstance(form, GroupForm):
            kind = getattr(tensor, "type_name", None) if self._makes is None else None
            own = form.dividing(columns) if self._makes is not None else form
            size = _group_row_bytes(own, columns) if kind is None else row_bytes(kind, form, columns)
            self.num_bytes += _up_to(rows, TILE) * size
        elif isinstance(form, Fp4Form):  # scales outside of float16's range, which take twice as much, are rare
            self.num_bytes += _up_to(rows, TILE) * (columns // 2 + columns // GROUP * 2)
        else:
            self.num_bytes += _up_to(rows, TILE) * (columns + 4)

    def _form_of(self, tensor: Any) -> Form | None:
        if self._makes is not None or not self._packs:
            return self._makes
        form = Int8Form() if isinstance(tensor, Int8Tensor) else getattr(tensor, "form", None)
        return form if isinstance(form, GroupForm | Int8Form) or form == Fp4Form(GROUP) else None


def _item_bytes(tensor: Stored) -> int:
    """Of a dense matrix. Those of GGUF files are read as float32."""
    if getattr(tensor, "type_name", None) is not None:
        return 4
    dtype = tensor.read((slice(0, 1),)).dtype
    return dtype.itemsize if dtype in DENSE else 4


def _up_to(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def _group_row_bytes(form: GroupForm, columns: int) -> int:
    scale = 2 if form.scale_dtype == "float16" else 4
    return columns * form.bits // 8 + columns // form.sizes_in(columns)[0] * (scale + form.zero)


def step_weight_bytes(config: Config, model: ModelSpec, path: Path) -> int:
    """Of the native step."""
    packs = keeps_packed(config) and config.quantization not in FORMS_MADE
    counted: list[CountedWeight] = []

    makes = forms_to_make(config, model)

    def target_of(prefix: str, name: str, weight: Weight) -> Target:
        counted.append(CountedWeight(packs=packs, makes=makes(prefix, weight)))
        return counted[-1]

    _count(config, model, path, native_slots(model, target_of))
    return sum(each.num_bytes for each in counted)


def products_weight_bytes(config: Config, model: ModelSpec, path: Path) -> int:
    """Of layers of torch with native products."""
    shard, packs, makes = whole_model(model), keeps_packed(config), forms_to_make(config, model)
    plain = weight_formats(config.quantization, model.packing)
    counted: list[CountedWeight] = []
    slots: dict[str, Slot] = {}

    def of_weight(prefix: str, weight: Weight, shape: tuple[int, ...]) -> int:
        if not multiplies(prefix, weight, model.packing if packs else None, makes):
            return plain.of(prefix, weight).num_bytes(shape, torch.float32.itemsize)
        counted.append(CountedWeight(packs=packs, makes=makes(prefix, weight)))
        slots.update((prefix + name, slot) for name, slot in slots_of(weight, counted[-1]).items())
        return 0

    others = num_bytes(shard, of_weight)
    _count(config, model, path, slots)
    return others + sum(each.num_bytes for each in counted)


def _count(config: Config, model: ModelSpec, path: Path, slots: dict[str, Slot]) -> None:
    """Show the tensors of a checkpoint to the targets of its slots."""
    load_checkpoint(
        path,
        config.load_format,
        slots,
        dtype=torch.float32,
        packing=model.packing,
        names=model.file_names,
        is_elsewhere=tensor_names(model).__contains__,
        shows_progress=False,
    )
