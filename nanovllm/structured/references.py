"""Local references of a JSON schema."""

from typing import Any
from urllib.parse import unquote


def local_target(document: dict[str, Any], ref: str) -> Any:
    """What a reference, a JSON pointer into the document, points to; None if it is not local or points to nothing."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found: Any = document
    for step in ref.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found
