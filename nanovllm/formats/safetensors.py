"""Tensors of a folder of safetensors files, one at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.errors import CheckpointError
from nanovllm.model_config import read_json

if TYPE_CHECKING:
    from torch import Tensor


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint: those its index names, or all that lie there."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: holds no *.safetensors file")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is no plain file name")
        if not (folder / name).exists():
            raise CheckpointError(f"{folder}: {name} is named by {index.name} and missing")
    return [folder / name for name in names]


def iter_tensors(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: damaged or incomplete: {error}") from error
