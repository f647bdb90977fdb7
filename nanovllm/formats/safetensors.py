"""Tensors of a folder of safetensors files, one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import CheckpointError
from nanovllm.model_config import read_json

if TYPE_CHECKING:
    from torch import Tensor


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint: the one of the usual name, or those its index names, or all that lie there."""
    index = folder / "model.safetensors.index.json"
    if (single := folder / "model.safetensors").exists():
        return [single]
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: holds no *.safetensors file")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is no plain file name")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{folder}: {file.name} is named by {index.name} and missing")
    return files


def iter_tensors(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    """Each file is opened anew for each tensor: closing unmaps its pages, which would else count as a second model."""
    for file in weight_files(folder):
        with _opened(file) as tensors:
            names = list(tensors.keys())
        for name in names:
            with _opened(file) as tensors:
                tensor = tensors.get_tensor(name)
            yield name, tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or incomplete: {error}") from error
