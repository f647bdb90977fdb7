"""Checks of structured outputs, and the text from which their grammar is compiled."""

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.option import refuse
from nanovllm.value_lists import strings

MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH = 256 * 1024, 64
MAX_REGEX_BYTES = 8 * 1024
MAX_CHOICES, MAX_CHOICE_BYTES = 1024, 64 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024


def checked(form: Mapping[str, Any]) -> dict[str, Any]:
    """Check the fields of a `StructuredOutputs`; returns those that are stored in another form."""
    if not isinstance(form["json_object"], bool):
        refuse("json_object", form["json_object"], "must be True or False")
    kinds = [name for name, value in form.items() if value not in (None, False)]
    if len(kinds) != 1:
        found = f"{', '.join(kinds)} are" if kinds else "nothing is"
        raise ValueError(
            f"structured_outputs: {found} set; set exactly one of json, json_object, regex, choice and grammar"
        )
    for name, limit in (("regex", MAX_REGEX_BYTES), ("grammar", MAX_GRAMMAR_BYTES)):
        text = form[name]
        if text is not None:
            if not isinstance(text, str) or not text:
                refuse(name, text, "must be a non-empty string")
            _check_size(name, text, limit)
    if form["json"] is not None:
        return {"json": _schema_text(form["json"])}
    return {} if form["choice"] is None else {"choice": _checked_choice(form["choice"])}


def grammar_source(form: Mapping[str, Any]) -> tuple[str, str]:
    """(kind, text): the kind of grammar (json, choice, regex or grammar) and its source text."""
    if form["json_object"]:
        return "json", '{"type": "object"}'
    if form["choice"] is not None:
        return "choice", json.dumps(form["choice"])
    return next((kind, text) for kind in ("json", "regex", "grammar") if (text := form[kind]) is not None)


def _check_size(field: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        refuse(field, text, "is not valid Unicode: it has a lone surrogate")
    if size > limit:
        raise ValueError(f"{field}: must have at most {limit} bytes, and has {size} bytes")


def _depth(value: object) -> int:
    """How deep objects and arrays are nested. Counts without recursion, and stops above MAX_SCHEMA_DEPTH."""
    depth, level = 0, [value]
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        depth, level = depth + bool(inner), [part for items in inner for part in items]
    return depth


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _schema_text(schema: object) -> str:
    """Check a schema, given as a mapping or as JSON text, and return it as JSON text."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        _check_size("json", text, MAX_SCHEMA_BYTES)
        parsed = json.loads(text, parse_constant=_not_json)
    except RecursionError:
        raise ValueError(f"json: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"json: not a JSON schema: {error}") from None
    if not isinstance(parsed, dict):
        refuse("json", parsed, "a JSON schema must be an object, or the text of one")
    if _depth(parsed) > MAX_SCHEMA_DEPTH:
        raise ValueError(f"json: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return text


def _checked_choice(choice: Any) -> tuple[str, ...]:
    if isinstance(choice, str):
        refuse("choice", choice, "must be a list of strings")
    choice = tuple(dict.fromkeys(strings("choice", choice)))
    if not 0 < len(choice) <= MAX_CHOICES:
        raise ValueError(f"choice: must have 1 to {MAX_CHOICES} strings, and has {len(choice)}")
    _check_size("choice", "".join(choice), MAX_CHOICE_BYTES)
    return choice
