"""Read the JSON files of a checkpoint. Does not import torch."""

import json
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or a CheckpointError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must be a JSON object, not a {type(content).__name__}; download it again")
    return content
