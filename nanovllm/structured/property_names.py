"""Write `propertyNames`, which pydantic uses for a dict with known keys, as `properties`, which llguidance supports."""

from typing import Any

from nanovllm.structured.keywords import NOT_SCHEMAS, SCHEMAS_BY_NAME
from nanovllm.structured.references import local_target

_MAX_NAMES = 256
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "$comment"}


def list_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which `propertyNames` with a list of names, or a pattern, say the same with other keywords.

    Others stay as they are, and llguidance refuses them by name.
    """
    return _rewritten(schema, schema)


def _rewritten(schema: Any, document: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_rewritten(part, document) for part in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            copy[key] = {name: _rewritten(part, document) for name, part in value.items()}
        else:
            copy[key] = value if key in NOT_SCHEMAS else _rewritten(value, document)
    names = _names(copy.get("propertyNames"), document)
    if names is None or "properties" in copy or "patternProperties" in copy:
        return copy
    del copy["propertyNames"]
    values = copy.get("additionalProperties", True)
    return (
        copy | {key: dict.fromkeys(listed, values) for key, listed in names.items()} | {"additionalProperties": False}
    )


def _names(schema: Any, document: dict[str, Any]) -> dict[str, list[str]] | None:
    """The names that a schema of names allows, as {keyword: names or patterns}; None if they cannot be listed."""
    if isinstance(schema, dict) and set(schema) - _ANNOTATIONS == {"$ref"} and isinstance(schema["$ref"], str):
        schema = local_target(document, schema["$ref"])
    if not isinstance(schema, dict) or schema.get("type", "string") != "string":
        return None
    match {key: value for key, value in schema.items() if key not in _ANNOTATIONS}:
        case {"enum": list(names), **rest} if not rest and len(names) <= _MAX_NAMES:
            return {"properties": [name for name in names if isinstance(name, str)]}
        case {"const": str(name), **rest} if not rest:
            return {"properties": [name]}
        case {"pattern": str(pattern), **rest} if not rest:
            return {"patternProperties": [pattern]}
    return None
