"""Experts that a file keeps as one tensor, as tensors of their own.

Most files have [experts, out, in], gate and up maybe in one tensor, one after the other. gpt-oss, whose experts have
biases, has [experts, in, out], in which the columns of gate and up alternate, and biases of [experts, out]; in GGUF
files, whose names end with .weight and .bias, its experts are as those of others.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanovllm.checkpoint.packed.tensor import spans
from nanovllm.checkpoint.stored import Part, Stored
from nanovllm.errors import CheckpointError

STACK = re.compile(r"(.*\.(?:mlp|moe)\.experts)\.(gate|up|down|gate_up)_proj(\.weight|\.bias|_bias)?$")


def unstack_experts(
    tensors: Iterable[tuple[str, Stored]], *, is_known: Callable[[str], bool]
) -> Iterator[tuple[str, Stored]]:
    """`is_known`: whether the model has a tensor of this name."""
    for name, tensor in tensors:
        stacked = STACK.match(name)
        is_bias = stacked is not None and bool(stacked[3]) and stacked[3].endswith("bias")
        if stacked is None or len(tensor.shape) != (2 if is_bias else 3):
            yield name, tensor
            continue
        module, parts, kind = stacked[1], stacked[2].split("_"), "bias" if is_bias else "weight"
        alternate = stacked[3] in (None, "_bias") and is_known(f"{module}.0.down_proj.bias")
        num_experts, num_rows = tensor.shape[:2]
        size = num_rows // len(parts)
        if (num_rows if is_bias or not alternate else tensor.shape[2]) % len(parts):
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, which does not divide into {stacked[2]}")
        for expert in range(num_experts):
            for index, part in enumerate(parts):
                own: Stored = _OfStack(tensor, expert, range(index * size, (index + 1) * size))
                if alternate:
                    own = (_AlternatingBias if is_bias else _Alternating)(tensor, expert, index, len(parts))
                yield f"{module}.{expert}.{part}_proj.{kind}", own


@dataclass(frozen=True)
class _OfStack:
    """Some rows of one expert, in a tensor that holds all of them: [experts, out, in]."""

    stack: Stored
    expert: int
    rows: range

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), *self.stack.shape[2:]

    def _in_stack(self, part: Part) -> Part:
        wanted, *columns = part or (slice(None),)
        rows = self.rows[wanted]
        return slice(self.expert, self.expert + 1), slice(rows.start, rows.stop), *columns

    def read(self, part: Part = ()) -> Tensor:
        return self.stack.read(self._in_stack(part))[0]

    @property
    def form(self) -> Any:
        """The packed form of the stack, if it has one."""
        return getattr(self.stack, "form", None)

    @property
    def type_name(self) -> str | None:
        """The GGUF type of the stack, if it is from a GGUF file."""
        return getattr(self.stack, "type_name", None)

    def pieces(self, part: Part, *how: Any) -> Any:
        """The packed pieces of this expert; only for a stack that has a packed form."""
        stack: Any = self.stack
        return stack.pieces(self._in_stack(part), *how)

    def blocks(self, part: Part) -> Any:
        """The blocks of this expert's rows; only for a stack from a GGUF file."""
        stack: Any = self.stack
        return stack.blocks(self._in_stack(part))


@dataclass(frozen=True)
class _Alternating:
    """Every `step`-th column of one expert in [experts, in, out], as a matrix of [out / step, in]."""

    stack: Stored
    expert: int
    first: int
    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        _, columns, rows = self.stack.shape
        return rows // self.step, columns

    def read(self, part: Part = ()) -> Tensor:
        rows, columns = spans(part, self.shape)
        whole = slice(rows.start * self.step, rows.stop * self.step)
        wanted = (slice(self.expert, self.expert + 1), slice(columns.start, columns.stop), whole)
        return self.stack.read(wanted)[0, :, self.first :: self.step].t()


@dataclass(frozen=True)
class _AlternatingBias:
    """Every `step`-th number of one expert in [experts, out]."""

    stack: Stored
    expert: int
    first: int
    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stack.shape[1] // self.step,)

    def read(self, part: Part = ()) -> Tensor:
        whole = self.stack.read((slice(self.expert, self.expert + 1),))
        return whole[0, self.first :: self.step][part]
