"""Loads a checkpoint into the model's weights, one tensor at a time; missing and unexpected tensors are errors."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.checkpoint.reordered import reorder
from nanovllm.checkpoint.stored import Part, Slot, Stored
from nanovllm.checkpoint.text_part import text_tensors
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    from nanovllm.checkpoint.names import FileNames
    from nanovllm.weights.forms import Packing

# buffers that some checkpoints contain and that are computed here
IGNORED = re.compile(r"rotary_emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$")
STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate|up|down|gate_up)_proj(?:\.weight)?$")
MAX_NAMED = 8  # tensors listed by name in an error


def load_checkpoint(
    path: Path,
    load_format: str,
    slots: dict[str, Slot],
    *,
    dtype: torch.dtype,  # that the model computes in
    packing: "Packing | None" = None,  # of a quantized checkpoint
    names: "FileNames | None" = None,  # None = tensors have the names of the specs
    is_elsewhere: Callable[[str], bool],  # whether a tensor without a slot belongs to other ranks, or is not needed
    shows_progress: bool,
) -> None:
    tensors = text_tensors(checkpoint_tensors(path, load_format, dtype), source=str(path))
    if names is not None:
        tensors = ((names.in_specs(name), tensor) for name, tensor in tensors)
    if packing is not None and packing.layout != "gguf":
        from nanovllm.checkpoint.packed.tensors import packed_tensors

        tensors = packed_tensors(
            tensors, packing, source=str(path), is_known=lambda name: name in slots or is_elsewhere(name)
        )
    # disable=None: a bar on a terminal, nothing in a log
    disable = None if shows_progress else True
    bar = tqdm(tensors, desc="Loading weights", unit="tensor", total=len(slots), leave=False, disable=disable)
    load_weights(slots, bar, source=str(path), is_elsewhere=is_elsewhere)


def checkpoint_tensors(path: Path, load_format: str, dtype: torch.dtype) -> Iterator[tuple[str, Stored]]:
    """Those of a GGUF file are readable until the last was asked for."""
    if load_format == "gguf" or (load_format == "auto" and path.is_file()):
        from nanovllm.checkpoint.gguf import GGUFFile

        with GGUFFile(path) as file:
            yield from file.stored_tensors(dtype)
    else:
        from nanovllm.checkpoint.safetensors import stored_tensors

        yield from stored_tensors(path)


def load_weights(
    slots: dict[str, Slot], tensors: Iterable[tuple[str, Stored]], *, source: str, is_elsewhere: Callable[[str], bool]
) -> None:
    """Give each tensor to its slot. Raises unless every slot was filled and every tensor had one here or elsewhere."""
    missing = dict(slots)
    unexpected: list[str] = []
    for name, tensor in _unstack(tensors):
        slot = missing.pop(name, None)
        if slot is None:
            if name in slots:
                raise CheckpointError(f"{source}: {name} occurs twice")
            if not IGNORED.search(name) and not is_elsewhere(name):
                unexpected.append(name)
            continue
        if slot.shape != tensor.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(tensor.shape)}, and the config asks for {list(slot.shape)}"
            )
        try:
            slot.load(reorder(tensor, slot.order) if slot.order else tensor)
        except ValueError as error:
            raise CheckpointError(f"{source}: {name}: {error}") from error
    if missing or unexpected:
        raise CheckpointError(
            f"{source}: the weights do not fit the config: {_account('missing', sorted(missing))}; "
            f"{_account('unexpected', unexpected)}"
        )


@dataclass(frozen=True)
class _OfStack:
    """Some rows of one expert, in a tensor that holds all of them: [experts, out, in]."""

    stack: Stored
    expert: int
    rows: range

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), self.stack.shape[2]

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

    def pieces(self, part: Part, *how: Any) -> Any:
        """The packed pieces of this expert; only for a stack that has a packed form."""
        stack: Any = self.stack
        return stack.pieces(self._in_stack(part), *how)


def _unstack(tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """Experts that a file keeps as one [experts, out, in] tensor, gate and up maybe in one, as tensors of their own."""
    for name, tensor in tensors:
        stacked = STACKED_EXPERTS.match(name)
        if stacked is None or len(tensor.shape) != 3:
            yield name, tensor
            continue
        parts = stacked[2].split("_")
        num_experts, num_rows, _ = tensor.shape
        size = num_rows // len(parts)
        for expert in range(num_experts):
            for index, part in enumerate(parts):
                rows = range(index * size, (index + 1) * size)
                yield f"{stacked[1]}.{expert}.{part}_proj.weight", _OfStack(tensor, expert, rows)


def _account(word: str, names: list[str]) -> str:
    if not names:
        return f"nothing {word}"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {word}: {', '.join(names[:MAX_NAMED])}{more}"
