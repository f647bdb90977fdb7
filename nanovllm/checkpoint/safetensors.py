"""Tensors of a folder of safetensors files, to be read one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.stored import Part, Stored
from nanovllm.errors import CheckpointError
from nanovllm.models.spec import read_json

if TYPE_CHECKING:
    from torch import Tensor

BYTES_OPEN = 8 << 20  # read from a file before it is opened anew, which takes as long as a small tensor


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


class _File:
    """Opened by the first read, and closed when much has been read: closing unmaps the file's pages, which would else
    count as a second model."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Any = None
        self._num_bytes = 0

    def read(self, name: str, part: Part) -> "Tensor":
        with _damage_named(self._path):
            if self._opened is None:
                self._opened = _open(self._path)
            tensor = self._opened.get_slice(name)[part] if part else self._opened.get_tensor(name)
        self._num_bytes += tensor.nbytes
        return tensor

    def close_after(self, num_bytes: int) -> None:
        if self._opened is not None and self._num_bytes >= num_bytes:
            self._opened.__exit__(None, None, None)
            self._opened, self._num_bytes = None, 0


@dataclass(frozen=True)
class _InFile:
    file: _File
    name: str
    shape: tuple[int, ...]

    def read(self, part: Part = ()) -> "Tensor":
        return self.file.read(self.name, part)


def stored_tensors(folder: Path) -> Iterator[tuple[str, Stored]]:
    """Each is readable until the next is asked for."""
    for path in weight_files(folder):
        with _damage_named(path), _open(path) as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in list(tensors.keys())}
        file = _File(path)
        for name, shape in shapes.items():
            yield name, _InFile(file, name, shape)
            file.close_after(BYTES_OPEN)
        file.close_after(0)


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
