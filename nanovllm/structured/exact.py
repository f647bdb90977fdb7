"""JSON schemas as llguidance gets them: objects closed, refused if they cannot be enforced, and with its options."""

import json
from typing import Any

from nanovllm.structured.closed_objects import close_objects
from nanovllm.structured.property_names import list_properties
from nanovllm.structured.schema import ESCAPES, check_schema

# One space, or a newline with indentation. Without this limit a model could generate whitespace forever.
WHITESPACE = r" |\n[ \t]{0,40}"
OPTIONS = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": ESCAPES}


def exact_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that is compiled; a RequestError if it cannot be enforced exactly."""
    closed = close_objects(list_properties(schema))
    check_schema(closed)
    own = closed.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, dict) else {}), **OPTIONS}
    return {**closed, "x-guidance": options}


def json_or_call(content: dict[str, Any], opener: int, call: dict[str, Any] | None, closer: int | None) -> str:
    """A grammar, in Lark, of JSON that follows the schema `content`, or of tool calls, which begin with the token
    `opener`: JSON that follows the schema `call`, up to the token `closer`; without these two, anything."""
    calls = f"<[{opener}]> <[*]>*"
    if call is not None and closer is not None:
        calls = f'(<[{opener}]> BREAK body BREAK <[{closer}]> BREAK)+\nbody: {_json(call)}\nBREAK: "\\n"?'
    return f"start: content | calls\ncontent: {_json(content)}\ncalls: {calls}"


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(exact_schema(schema))}"
