"""Tensors of a folder of safetensors files, to be read one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import CheckpointError
from nanovllm.formats.stored import Part, Stored
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


class _InFile:
    """A tensor whose file is opened by the first read and closed when it is done with: closing unmaps the file's pages,
    which would else count as a second model."""

    def __init__(self, file: Path, name: str, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._file, self._name = file, name
        self._opened: Any = None

    def read(self, part: Part = ()) -> "Tensor":
        with _damage_named(self._file):
            if self._opened is None:
                self._opened = _open(self._file)
            return self._opened.get_slice(self._name)[part] if part else self._opened.get_tensor(self._name)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.__exit__(None, None, None)


def stored_tensors(folder: Path) -> Iterator[tuple[str, Stored]]:
    """Each is readable until the next is asked for."""
    for file in weight_files(folder):
        with _damage_named(file), _open(file) as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in list(tensors.keys())}
        for name, shape in shapes.items():
            stored = _InFile(file, name, shape)
            yield name, stored
            stored.close()


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt", device="cpu")


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or incomplete: {error}") from error
