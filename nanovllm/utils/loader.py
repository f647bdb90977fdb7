"""From a checkpoint into the model's parameters, one tensor at a time, with a strict account of what was there."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.errors import CheckpointError

# what checkpoints carry beside weights: buffers that are computed here
IGNORED = re.compile(r"rotary_emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$")
STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate|up|down|gate_up)_proj(?:\.weight)?$")
MAX_NAMED = 8  # tensors listed by name in an error


def checkpoint_tensors(path: Path, load_format: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    if load_format == "gguf" or (load_format == "auto" and path.is_file()):
        from nanovllm.formats.gguf import GGUFFile

        with GGUFFile(path) as file:
            yield from file.iter_tensors(dtype)
    else:
        from nanovllm.formats.safetensors import iter_tensors

        yield from iter_tensors(path)


def load_weights(
    destinations: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]], *, source: str, tied_head: bool
) -> None:
    """Copy each tensor to its destination. Raises unless every destination was filled and every tensor had one."""
    missing = dict(destinations)
    unexpected: list[str] = []
    for name, tensor in _unstack(tensors):
        view = missing.pop(name, None)
        if view is None:
            ignorable = IGNORED.search(name) or (tied_head and name == "lm_head.weight")
            if name in destinations:
                raise CheckpointError(f"{source}: {name} occurs twice")
            if not ignorable:
                unexpected.append(name)
            continue
        if view.shape != tensor.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(tensor.shape)}, and the config asks for {list(view.shape)}"
            )
        view.copy_(tensor)
    if missing or unexpected:
        raise CheckpointError(
            f"{source}: the weights do not fit the config: {_account('missing', list(missing))}; "
            f"{_account('unexpected', unexpected)}"
        )


def fill_dummy(destinations: dict[str, Tensor], seed: int) -> None:
    """Random weights of a size that keeps activations sane; norms stay 1, biases 0."""
    generators = {view.device: torch.Generator(view.device).manual_seed(seed) for view in destinations.values()}
    for name, view in destinations.items():
        if view.dim() > 1:
            view.normal_(0.0, 0.02, generator=generators[view.device])
        else:
            view.fill_(0.0 if name.endswith(".bias") else 1.0)


def _unstack(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Experts that a file keeps as one [experts, out, in] tensor, gate and up maybe in one, as tensors of their own."""
    for name, tensor in tensors:
        stacked = STACKED_EXPERTS.match(name)
        if stacked is None or tensor.dim() != 3:
            yield name, tensor
            continue
        parts = stacked[2].split("_")
        for index, expert in enumerate(tensor):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{stacked[1]}.{index}.{part}_proj.weight", weight


def _account(word: str, names: list[str]) -> str:
    if not names:
        return f"nothing {word}"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {word}: {', '.join(names[:MAX_NAMED])}{more}"
