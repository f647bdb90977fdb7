"""JSON from the plain text of an argument, by the types that the tool's schema declares for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.server.parsers.json_object import ObjectScanner, Status
from nanovllm.structured.references import local_target

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # templates write values as Python prints them

_INTEGER = re.compile(r"-?[0-9]+")
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def as_json(text: str, name: str, parameters: Mapping[str, Any]) -> str:
    """The argument `name` as JSON. `parameters` is the schema of the tool's arguments.

    Text that is JSON is passed on as it is, unless a string is declared and not its type. All other text is a string,
    as is a JSON string with its quotes: these formats write strings without them.
    """
    types = _types_of(name, parameters)
    value = text.strip()
    value = PYTHON_WORDS.get(value, value)
    kind = json_kind(value)
    is_declared = kind in types or (kind == "integer" and "number" in types)
    if kind in (None, "string") or ("string" in types and not is_declared):
        return json.dumps(text, ensure_ascii=False)
    return value


def is_string(name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether the argument is a string, whatever its text is."""
    return _types_of(name, parameters) == {"string"}


def _types_of(name: str, parameters: Mapping[str, Any]) -> set[str]:
    properties = parameters.get("properties")
    return declared_types(properties.get(name) if isinstance(properties, Mapping) else None, parameters)


def json_kind(text: str) -> str | None:
    """The type of a JSON value; None if the text is not one."""
    wrapped = f'{{"":{text}}}'
    scanner = ObjectScanner(0)
    if scanner.scan(wrapped) is not Status.COMPLETE or scanner.members.get("") != slice(4, len(wrapped) - 1):
        return None
    return _KINDS.get(text[0]) or ("integer" if _INTEGER.fullmatch(text) else "number")


def declared_types(schema: Any, document: Mapping[str, Any]) -> set[str]:
    """The types that a schema admits; empty if it admits any. `document` is where its references point to."""
    types: set[str] = set()
    followed: set[str] = set()  # references
    pending = [schema]
    while pending:
        match pending.pop():
            case {"$ref": str(ref)}:
                if ref not in followed:
                    followed.add(ref)
                    pending.append(local_target(dict(document), ref))
            case {"type": str(declared), **rest}:
                types |= {declared, "null"} if rest.get("nullable") is True else {declared}
            case {"type": [*several]}:
                types |= {each for each in several if isinstance(each, str)}
            case {"enum": [*values]}:
                types |= {kind for value in values if (kind := json_kind(json.dumps(value)))}
            case {"const": value}:
                pending.append({"enum": [value]})
            case {"anyOf": [*branches]} | {"oneOf": [*branches]} | {"allOf": [*branches]}:
                pending += branches
            case _:
                return set()
    return types
