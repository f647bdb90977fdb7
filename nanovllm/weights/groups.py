"""4- and 8-bit integer weights with a scale, and maybe a zero, per group of columns: w = (q - zero) * scale.

One form for AWQ, GPTQ and compressed-tensors, in the layout that checkpoint/packed/groups.py describes. Inputs stay in
the model's dtype (W4A16, W8A16); the weight is dequantized in float32 and rounded to it.
"""

import math

import torch
from torch import Tensor

from nanovllm.checkpoint.packed.groups import GroupTensor, Pieces, dequantize, quantize_groups
from nanovllm.checkpoint.stored import Index, Part, Stored
from nanovllm.weights.forms import GroupForm
from nanovllm.weights.tiles import matmul_by_tiles


class GroupWeight:
    def __init__(self, form: "GroupFormat", shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        stored = form.form
        self.format_name, self.shape = form.name, shape
        self.bits, self.group = stored.bits, form.group_of(shape)
        per_byte, small = 8 // stored.bits, torch.uint8 if stored.bits == 4 else torch.int8
        groups = (*shape[:-1], form.num_groups(shape))
        self.tensor = torch.zeros((*shape[:-1], shape[-1] // per_byte), dtype=small, device=device)
        self.scale = torch.ones(groups, dtype=getattr(torch, stored.scale_dtype), device=device)
        self.zero = torch.zeros(groups, dtype=small, device=device) if stored.zero else None
        self.order: Tensor | None = None  # the group of each column, [..., in]
        if stored.ordered:
            self.order = torch.zeros((*shape[:-2], shape[-1]), dtype=torch.int32, device=device)
        self._form, self._dtype = form, dtype

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        if not self.tensor[index].numel():
            return
        if not isinstance(tensor, GroupTensor):
            if not self._form.quantizes:
                raise ValueError(f"the config says that it has {self.bits} bits, but the file holds it unpacked")
            tensor = quantize_groups(tensor.read().to(self._dtype), self._form.form)
        pieces = tensor.pieces(part, self.group, self.tensor.device)
        self.tensor[index] = pieces.codes
        self.scale[index] = pieces.scale
        if not torch.equal(self.scale[index].float(), pieces.scale.float()):
            raise ValueError(f"its scales are {pieces.scale.dtype}, and those of other weights {self.scale.dtype}")
        if self.zero is not None and pieces.zero is not None:
            self.zero[index] = pieces.zero
        if self.order is not None and pieces.group_of is not None:
            self.order[index[:-1]] = pieces.group_of

    def finish_loading(self) -> None:
        """Read as it was loaded."""

    def dequantized(self, expert: int | None = None, rows: slice = slice(None)) -> Tensor:
        """In float32."""
        held = (self.tensor, self.scale, self.zero, self.order)
        tensor, scale, zero, order = (one if expert is None or one is None else one[expert] for one in held)
        assert tensor is not None and scale is not None
        own = None if zero is None else zero[..., rows, :]
        pieces = Pieces(tensor[..., rows, :], scale[..., rows, :], own, order)
        return dequantize(pieces, bits=self.bits, group=self.group)

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        shape = (self.shape[-2], self.shape[-1])
        y = matmul_by_tiles(x, shape, lambda rows: self.dequantized(expert, rows).to(x.dtype))
        return y if bias is None else y + bias

    def kernel_arguments(self) -> dict[str, Tensor]:
        found = {"weight": self.tensor, "scale": self.scale, "zero": self.zero, "order": self.order}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


class GroupFormat:
    def __init__(self, form: GroupForm, *, columns: int, start: int = 0, quantizes: bool = True) -> None:
        """`columns`: of the whole weight. `start`: a number of columns that divides the begin of every rank's part.
        `quantizes`: tensors that are not packed yet are rounded; otherwise they are refused."""
        self.name = f"int{form.bits}_groups"
        self.form, self.quantizes = form, quantizes
        self._columns, self._start = columns, start

    def group_of(self, shape: tuple[int, ...]) -> int:
        """Columns that share a scale: the checkpoint's groups, cut where parts begin within one."""
        return self.form.group_in(shape[-1], self._start, shape[-1])

    def num_groups(self, shape: tuple[int, ...]) -> int:
        """Per row. Columns that are not in order may have any of the whole row's groups."""
        if self.form.ordered:
            return self._columns // self.form.group_in(self._columns)
        return shape[-1] // self.group_of(shape)

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        groups = math.prod(shape[:-1]) * self.num_groups(shape)
        scale_bytes = getattr(torch, self.form.scale_dtype).itemsize + self.form.zero
        order_bytes = 4 * math.prod(shape[:-2]) * shape[-1] if self.form.ordered else 0
        return math.prod(shape) * self.form.bits // 8 + groups * scale_bytes + order_bytes

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> GroupWeight:
        return GroupWeight(self, shape, dtype, device)
