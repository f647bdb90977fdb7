"""What the name of a model can mean: a folder or file, the default model, or a Hugging Face hub id.

Imports nothing heavy: the hub client and zip handling are imported only for a download.
"""

import os
import re
from pathlib import Path

from nanovllm.errors import CheckpointError, ModelNotFoundError
from nanovllm.utils.default_model import DEFAULT_MODEL, default_model_path

HUB_ID = r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>\S+))?"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def find_model(model: str | os.PathLike[str] | None) -> Path:
    """Return the .gguf file or the checkpoint folder of a model, downloading it if necessary.

    `None` means the default model. Otherwise an existing file or folder is used, then the default model's name is
    recognized, then a hub id ("org/name" or "org/name@revision").
    """
    if model is None:
        return default_model_path()
    name = os.fspath(model)
    path = Path(name).expanduser()
    if path.is_file():
        return _checked_file(path)
    if name and path.is_dir():  # Path("") is the current folder
        return _checked_folder(path)
    if name == DEFAULT_MODEL:
        return default_model_path()
    if (match := re.fullmatch(HUB_ID, name)) and path.suffix != ".gguf":
        from nanovllm.utils.snapshot import download_snapshot

        return _checked_folder(download_snapshot(name, match["repo"], match["revision"]))
    raise ModelNotFoundError(
        f"model={name!r}: no file or folder at {path.absolute()}, and it is not a hub id of the form 'org/name'; "
        "check the path, or leave the model out to use the default one"
    )


def _checked_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return path
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"model={str(path)!r}: {_pickle_refusal([path])}")
    raise CheckpointError(
        f"model={str(path)!r}: a single file must be a .gguf; for safetensors pass the folder with its config.json"
    )


def _checked_folder(folder: Path) -> Path:
    """The folder itself if it contains safetensors, or only a config for dummy weights; else its one .gguf file."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    has_config = any(file.name == "config.json" for file in files)
    if any(file.suffix == ".safetensors" for file in files):
        if has_config:
            return folder
        raise CheckpointError(f"model={str(folder)!r}: the folder contains safetensors but no config.json; add it")

    ggufs = [file for file in files if file.suffix == ".gguf"]
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise CheckpointError(f"model={str(folder)!r}: {len(ggufs)} .gguf files; choose one of them: {names}")

    if pickles := [file for file in files if file.suffix in PICKLE_SUFFIXES]:
        raise CheckpointError(f"model={str(folder)!r}: {_pickle_refusal(pickles)}")
    if has_config:
        return folder
    raise ModelNotFoundError(f"model={str(folder)!r}: the folder contains neither a config.json nor a .gguf file")


def _pickle_refusal(files: list[Path]) -> str:
    names = ", ".join(file.name for file in files[:3])
    return f"only pickle weights ({names}), which can run code and are never loaded; convert them to safetensors"
