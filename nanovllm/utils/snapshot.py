"""Downloads a checkpoint from the Hugging Face hub, or finds it in the hub's cache."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download

from nanovllm.errors import CheckpointError, ModelNotFoundError
from nanovllm.utils.default_model import one_line

# The files of a safetensors checkpoint, without pickle files.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*", "*.model")


def download_snapshot(name: str, repo: str, revision: str | None) -> Path:
    """The snapshot's folder; with HF_HUB_OFFLINE=1 or without a network, from the hub's cache only.

    `name` is the hub id as the user wrote it.
    """
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(HUB_PATTERNS)))
    except Exception as error:  # the client's errors have no common base class
        raise ModelNotFoundError(
            f"model={name!r}: no file or folder at {Path(name).absolute()}; "
            f"no snapshot in the hub's cache at {constants.HF_HUB_CACHE}; hub: {one_line(error)}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"model={name!r}: no *.safetensors in the hub's snapshot at {folder}; pickle weights are never loaded "
            "(convert them to safetensors); for a .gguf file pass the path of the downloaded file"
        )
    return folder
