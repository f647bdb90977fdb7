"""What the files of a checkpoint decide beside its config: the type of scales, and whether head and embedding are one.

No torch.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.checkpoint.safetensors import check_header, stored_dtype, weight_files
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.logging import get_logger

NAMES = re.compile(r"(?:(?:model|language_model)\.)*(lm_head|embed_tokens)\.weight")
STEP = 64  # one row of so many is compared, and all of the last ones, where tokens are added
LAST_ROWS = 1024


class _Place(NamedTuple):
    """Of a tensor in a file."""

    file: Path
    dtype: str
    shape: list[int]
    begin: int
    end: int


def as_stored(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec of a config, with what the folder's files say."""
    if spec.packing is not None:
        scales = stored_dtype(folder, (".scales", ".weight_scale")) or spec.dtype
        spec = replace(spec, packing=spec.packing.with_scales(scales))
    if spec.tie_word_embeddings and any(folder.glob("*.safetensors")) and stores_other_head(folder):
        spec = replace(spec, tie_word_embeddings=False)
    return spec


def stores_other_head(folder: Path) -> bool:
    """Whether `lm_head.weight` differs from the embedding; then it is used, as transformers does, with a warning.

    Files of tied models may hold both, and reading both takes as long as loading the embedding: a sample of the rows is
    compared.
    """
    places = _stored(folder)
    if len(places) < 2 or not _differ(*places.values()):
        return False
    get_logger(__name__).warning(
        f"{folder}: the config ties the output head to the embedding (tie_word_embeddings), but the files hold two "
        "different ones; each is used for itself"
    )
    return True


def _stored(folder: Path) -> dict[str, _Place]:
    """Head and embedding, as far as they are there."""
    found = {}
    for path in weight_files(folder):
        check_header(path)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        for match in filter(None, map(NAMES.fullmatch, header)):
            tensor = header[match.group()]
            begin, end = (8 + size + offset for offset in tensor["data_offsets"])
            found[match.group(1)] = _Place(path, tensor["dtype"], tensor["shape"], begin, end)
    return found


def _differ(one: _Place, other: _Place) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    num_rows = max(1, one.shape[0])
    size, last = (one.end - one.begin) // num_rows, min(num_rows, LAST_ROWS)
    parts = [(row * size, size) for row in range(0, num_rows, STEP)] + [((num_rows - last) * size, last * size)]
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for offset, length in parts:
            first.seek(one.begin + offset)
            second.seek(other.begin + offset)
            if first.read(length) != second.read(length):
                return True
    return False
