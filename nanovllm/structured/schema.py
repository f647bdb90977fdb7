"""Refuse parts of a JSON schema that llguidance accepts but does not enforce exactly.

llguidance itself refuses everything else that it does not support.
"""

import re
from collections.abc import Iterator
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.structured.keywords import NOT_SCHEMAS, SCHEMAS_BY_NAME

# The only escapes allowed in generated JSON strings. With \\uXXXX, an additional property could spell the name of a
# declared one and so evade that property's schema.
ESCAPES = '"\\bfnrt'
_NEEDS_UNICODE_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_NEGATED_CLASS = re.compile(r"\[\^(?:\\.|[^\]\\])*\]")
_CONTROL_ESCAPE = re.compile(r"\\(?:0|v|a|c.|x[01]|x7f|x\{|u00[01]|u007f|u\{0*[01]?[0-9a-f]\})", re.IGNORECASE)


def check_schema(schema: dict[str, Any]) -> None:
    """Raise a RequestError if the schema cannot be enforced exactly."""
    control = next((part for part in _strings(schema) if _NEEDS_UNICODE_ESCAPE.search(part)), None)
    if control is not None:
        raise RequestError(
            f"json: the schema's string {control!r} has a control character, which generated JSON cannot contain"
        )
    for part in _subschemas(schema):
        _check_patterns(part)
        _check_num_properties(part)


def _check_patterns(schema: dict[str, Any]) -> None:
    named = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(named if isinstance(named, dict) else ())]
    for pattern in patterns:
        if isinstance(pattern, str) and _CONTROL_ESCAPE.search(_NEGATED_CLASS.sub("", pattern)):
            raise RequestError(
                f"json: pattern {pattern!r} matches a control character, which generated JSON cannot contain"
            )


def _check_num_properties(schema: dict[str, Any]) -> None:
    """Refuse a minProperties that additional properties would have to meet: their keys may repeat, and count once."""
    minimum, required = schema.get("minProperties"), schema.get("required")
    guaranteed = max(1, len(required) if isinstance(required, list) else 0)
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if isinstance(minimum, int | float) and minimum > guaranteed and not closed:
        raise RequestError(
            f"json: minProperties={minimum} cannot be enforced if additional properties are allowed; list properties "
            "in `required` instead"
        )


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas inside it."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            yield part
            for key, value in part.items():
                if key in SCHEMAS_BY_NAME and isinstance(value, dict):
                    stack += value.values()
                elif key not in NOT_SCHEMAS:
                    stack.append(value)


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            stack += part.values()
            stack += part
