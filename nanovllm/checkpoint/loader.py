"""Loads a checkpoint into the model's weights, one tensor at a time; missing and unexpected tensors are errors."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from nanovllm.checkpoint.expert_stacks import unstack_experts
from nanovllm.checkpoint.reordered import Shifted, reorder
from nanovllm.checkpoint.stored import Slot, Stored
from nanovllm.checkpoint.text_part import text_tensors
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    from nanovllm.checkpoint.names import FileNames
    from nanovllm.weights.forms import Packing

# buffers that some checkpoints contain and that are computed here
IGNORED = re.compile(r"rotary_emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$")
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
    tensors = checkpoint_tensors(path, load_format, dtype)
    if names is not None:
        tensors = ((names.in_specs(name), tensor) for name, tensor in tensors if names.is_used(name))
    tensors = text_tensors(tensors, source=str(path))
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

        with GGUFFile(path, keeps_vocabulary=False) as file:
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
    for name, tensor in unstack_experts(tensors, is_known=lambda name: name in slots or is_elsewhere(name)):
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
        dtype = getattr(tensor, "dtype", "F32")  # only tensors of safetensors files that are not packed state one
        try:
            tensor = reorder(tensor, slot.order) if slot.order else tensor
            slot.load(Shifted(tensor, slot.offset) if slot.offset else tensor)
        except ValueError as error:
            raise CheckpointError(f"{source}: {name}: {error}") from error
        if not dtype.startswith(("F", "BF")):  # and the weight's format did not object to it
            raise CheckpointError(f"{source}: {name} holds integers ({dtype}), and scales for them are not known")
    if missing or unexpected:
        raise CheckpointError(
            f"{source}: the weights do not fit the config: {_account('missing', sorted(missing))}; "
            f"{_account('unexpected', unexpected)}"
        )


def _account(word: str, names: list[str]) -> str:
    if not names:
        return f"nothing {word}"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {word}: {', '.join(names[:MAX_NAMED])}{more}"
