"""Finds a model: a folder on this machine, or what else a name can mean (`find_model.py`)."""

import os
from pathlib import Path


def resolve_model(model: str | os.PathLike[str] | None) -> Path:
    """The checkpoint folder or .gguf file of a model, which is downloaded if necessary. None: the default model."""
    if model and _is_checkpoint(folder := Path(model).expanduser()):
        return folder
    from nanovllm.utils.find_model import find_model

    return find_model(model)


def _is_checkpoint(folder: Path) -> bool:
    """Whether this is a folder with a config and safetensors, or with a config only: enough for dummy weights."""
    if not (folder / "config.json").is_file():
        return False
    suffixes = {file.suffix for file in folder.iterdir()}
    return ".safetensors" in suffixes or suffixes == {".json"}
