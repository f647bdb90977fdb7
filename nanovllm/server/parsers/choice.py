"""Check tool definitions, resolve `tool_choice`, and make the JSON schema that enforces a tool call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanovllm.errors import ConfigError, RequestError
from nanovllm.server.parsers.call_format import FORCED_CALL, CallFormat, Tools
from nanovllm.server.parsers.formats import TOOL_PARSERS

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 * 2**10
MAX_TOOLS_DEPTH = 64

ToolChoice = str | Mapping[str, Any] | None

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# JSON Schema keywords whose value maps names to schemas, and keywords whose value is not a schema.
_NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_PLAIN_VALUES = {"const", "enum", "default", "examples", "required"}


def check_tools(tools: Any) -> None:
    """Raise a RequestError for invalid tool definitions; it names the position in the list."""
    if not isinstance(tools, list | tuple):
        raise RequestError("tools must be a list of function definitions")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are accepted")
    _check_size(tools)
    seen: set[str] = set()
    for position, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{position}]")
        if name in seen:
            raise RequestError(f"tools[{position}].function.name {name!r} is used twice; give each tool its own name")
        seen.add(name)


def _check_size(tools: Sequence[Any]) -> None:
    if _is_deeper_than(tools, MAX_TOOLS_DEPTH):
        raise RequestError(f"tools is nested more than {MAX_TOOLS_DEPTH} deep; flatten the schemas")
    try:
        size = len(json.dumps(tools, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        raise RequestError("tools must be plain JSON: strings, finite numbers, lists and mappings") from error
    if size > MAX_TOOLS_BYTES:
        raise RequestError(f"tools has {size} bytes as JSON; at most {MAX_TOOLS_BYTES} are accepted")


def _is_deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _check_tool(tool: Any, where: str) -> str:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f'{where}.type must be "function"; other kinds of tools are not supported')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be a mapping with name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.function.name must be 1 to 64 letters, digits, underscores or dashes")
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{where}.function.description must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{where}.function.strict must be true or false")
    parameters = function.get("parameters")
    if parameters is not None and not _is_object_schema(parameters):
        raise RequestError(f'{where}.function.parameters must be a JSON schema with "type": "object"')
    return name


def _is_object_schema(parameters: Any) -> bool:
    """True for a schema of an object. Some clients send an empty mapping for a function without parameters."""
    return isinstance(parameters, Mapping) and (not parameters or parameters.get("type") == "object")


def forces_call(tool_choice: ToolChoice) -> bool:
    """True if the model must call a tool: any, or the one that is named."""
    return tool_choice not in (None, "auto", "none")


def resolve_choice(tool_schemas: Sequence[Mapping[str, Any]], tool_choice: ToolChoice) -> str | Mapping[str, Any]:
    """`tool_choice` with the default filled in; for a named tool, the definition of that tool."""
    if tool_choice is None:
        return "auto" if tool_schemas else "none"
    if tool_choice == "none":
        return "none"
    if not tool_schemas:
        raise RequestError("tool_choice needs tools; add tools, or leave tool_choice out")
    if tool_choice == "auto" or tool_choice == "required":
        return tool_choice
    return _named_tool(tool_schemas, tool_choice)


def _named_tool(tool_schemas: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any]) -> Mapping[str, Any]:
    match tool_choice:
        case {"type": "function", "function": {"name": str(name)}}:
            pass
        case _:
            raise RequestError(
                'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
            )
    for tool in tool_schemas:
        if tool["function"]["name"] == name:
            return tool
    raise RequestError(f"tool_choice names {name!r}, which is not among the tools")


def known_tools(tool_schemas: Sequence[Mapping[str, Any]]) -> Tools:
    return {tool["function"]["name"]: tool["function"].get("parameters") or _NO_PARAMETERS for tool in tool_schemas}


def call_format(style: str | None) -> CallFormat:
    """The format of a tool parser by its name; None is the format of forced calls."""
    if style is None:
        return FORCED_CALL
    if style not in TOOL_PARSERS:
        raise ConfigError(f"unknown tool parser {style!r}; known are {', '.join(sorted(TOOL_PARSERS))}")
    return TOOL_PARSERS[style]


def forced_call_schema(
    tool_schemas: Sequence[Mapping[str, Any]], tool_choice: ToolChoice, style: str | None = None
) -> dict[str, Any]:
    """The JSON schema of the call that the model must generate for tool_choice "required" or a named tool."""
    key = call_format(style).arguments_key
    choice = resolve_choice(tool_schemas, tool_choice)
    if isinstance(choice, str) and choice != "required":
        raise RequestError(f'tool_choice "{choice}" forces no call; it must be "required" or name a tool')
    forced = tool_schemas if isinstance(choice, str) else [choice]
    if len(forced) == 1:
        return _call_schema(forced[0], key, "#")
    return {"oneOf": [_call_schema(tool, key, f"#/oneOf/{position}") for position, tool in enumerate(forced)]}


def call_or_content_schema(schema: Mapping[str, Any], tool_schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a message that is either content with this schema or a call of one of the tools."""
    calls = [_call_schema(tool, "arguments", f"#/anyOf/{position}") for position, tool in enumerate(tool_schemas, 1)]
    return {"anyOf": [_embedded(schema, "#/anyOf/0"), *calls]}


def _call_schema(tool: Mapping[str, Any], key: str, pointer: str) -> dict[str, Any]:
    """The schema of a call of one tool. `key` is the name of the arguments; `pointer` is where the schema will be."""
    function = tool["function"]
    parameters = function.get("parameters") or _NO_PARAMETERS
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            key: _embedded(parameters, f"{pointer}/properties/{key}"),
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def _embedded(schema: Mapping[str, Any], pointer: str) -> Any:
    """The schema as a part of another one, at a JSON pointer."""
    identity = ("$id", "$schema")  # they would make it a separate document for references
    return _with_moved_refs({name: value for name, value in schema.items() if name not in identity}, pointer)


def _with_moved_refs(schema: Any, pointer: str) -> Any:
    """A copy of the schema for embedding at a JSON pointer: local references ("#/$defs/...") are adjusted."""
    if isinstance(schema, list | tuple):
        return [_with_moved_refs(item, pointer) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[keyword] = pointer + value[1:]
        elif keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            moved[keyword] = {name: _with_moved_refs(each, pointer) for name, each in value.items()}
        else:
            moved[keyword] = value if keyword in _PLAIN_VALUES else _with_moved_refs(value, pointer)
    return moved
