"""Read the tensors of a folder of safetensors files one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.json_file import read_json
from nanovllm.checkpoint.stored import Part, Stored
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

BYTES_PER_OPEN = 8 << 20  # close a file after reading this much; opening it again costs as much as a small tensor


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: model.safetensors, else the files in its index, else all *.safetensors."""
    index = folder / "model.safetensors.index.json"
    if (single := folder / "model.safetensors").exists():
        return [single]
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: contains no *.safetensors file")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not a plain file name")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{folder}: {file.name} is listed in {index.name} but missing; download it again")
    return files


class _File:
    """A safetensors file that is opened when a tensor is read and closed regularly.

    Closing unmaps the pages that were read. Otherwise the process would hold the model in memory twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Any = None
        self._num_bytes = 0

    def read(self, name: str, part: Part) -> "Tensor":
        with _errors_name_file(self._path):
            if self._opened is None:
                self._opened = _open(self._path)
            tensor = self._opened.get_slice(name)[part] if part else self._opened.get_tensor(name)
        self._num_bytes += tensor.nbytes
        if self._num_bytes >= BYTES_PER_OPEN:  # the tensor keeps the pages that it needs
            self._opened.__exit__(None, None, None)
            self._opened, self._num_bytes = None, 0
        return tensor


@dataclass(frozen=True)
class _SafetensorsTensor:
    """A tensor in a safetensors file; implements `Stored`."""

    file: _File
    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file names it: BF16, F8_E4M3, I32, ...

    def read(self, part: Part = ()) -> "Tensor":
        return self.file.read(self.name, part)


def stored_tensors(folder: Path) -> Iterator[tuple[str, Stored]]:
    """Yield (name, stored tensor) for all tensors of a checkpoint."""
    for path in weight_files(folder):
        with _errors_name_file(path), _open(path) as tensors:
            slices = {name: tensors.get_slice(name) for name in list(tensors.keys())}
            kinds = {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
        file = _File(path)
        for name, (shape, dtype) in kinds.items():
            yield name, _SafetensorsTensor(file, name, shape, dtype)


def stored_dtype(folder: Path, endings: tuple[str, ...]) -> str | None:
    """The data type of the first tensor whose name ends like this; None if there is none, or no file. No torch."""
    if not any(folder.glob("*.safetensors")):
        return None
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    for path in weight_files(folder):
        with _errors_name_file(path), _open(path, framework="numpy") as tensors:
            found = next((name for name in list(tensors.keys()) if name.endswith(endings)), None)
            if found is not None:
                return names.get(tensors.get_slice(found).get_dtype())
    return None


def check_header(file: Path) -> None:
    """A CheckpointError if the file's header is not valid. No torch."""
    with _errors_name_file(file), _open(file, framework="numpy"):
        pass


def _open(file: Path, framework: str = "pt") -> Any:
    from safetensors import safe_open

    return safe_open(file, framework=framework, device="cpu")


@contextmanager
def _errors_name_file(file: Path) -> Iterator[None]:
    """Turn errors of the safetensors library into a CheckpointError that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or incomplete: {error}; download it again") from error
