"""JSON files of a checkpoint; no torch."""

import json
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not a {type(content).__name__}; fetch the file again")
    return content
