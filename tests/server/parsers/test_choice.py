"""Invalid tool definitions and choices are refused by name, and forced calls get a schema that accepts only them."""

import json
from typing import Any

import pytest

from nanovllm.errors import ConfigError, RequestError
from nanovllm.server.parsers import (
    call_or_content_schema,
    check_tools,
    forced_call_schema,
    make_parser,
    parse_forced_call,
)

POINT = {
    "$id": "https://example.org/point",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}, "$ref": {"type": "string"}, "const": {"$ref": "#/$defs/point"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/point"}, "kind": {"const": "#/a"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("move", parameters=POINT), tool("now"), tool("stay", parameters={})]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "tools",
    [
        [],
        TOOLS,
        [tool("a-B_9" + "x" * 59, description="d", strict=True)],
        [tool(f"f{i}") for i in range(128)],
        [tool(description=None, parameters=None, strict=None)],
    ],
)
def test_good_tools_pass(tools: list[Any]) -> None:
    check_tools(tools)


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ({}, "tools must be a list"),
        (["f"], r"tools\[0\]\.type"),
        ([tool(), {"type": "web_search"}], r"tools\[1\]\.type"),
        ([{"type": "function"}], r"tools\[0\]\.function must"),
        ([tool("")], "name must be"),
        ([tool("x" * 65)], "name must be"),
        ([tool("a b")], "name must be"),
        ([tool("f\n")], "name must be"),
        ([tool(7)], "name must be"),
        ([tool(), tool()], r"tools\[1\].*'f' is used twice"),
        ([tool(description=1)], "description"),
        ([tool(strict="yes")], "strict"),
        ([tool(parameters=[])], "parameters must be"),
        ([tool(parameters="x")], "parameters must be"),
        ([tool(parameters={"type": "string"})], "parameters must be"),
        ([tool(parameters={"properties": {}})], "parameters must be"),
        ([tool(f"f{i}") for i in range(129)], "129 entries; at most 128"),
        ([tool(description="x" * 600_000)], "bytes as JSON"),
        ([tool(parameters=deep(100))], "nested more than"),
        ([tool(parameters=deep(100_000))], "nested more than"),
        ([tool(parameters={"type": "object", "default": float("nan")})], "plain JSON"),
        ([tool(parameters={"type": "object", "default": b"x"})], "plain JSON"),
    ],
)
def test_bad_tools_are_refused(tools: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        check_tools(tools)


@pytest.mark.parametrize(
    ("tools", "choice", "complaint"),
    [
        (TOOLS, "any", '"none", "auto", "required"'),
        (TOOLS, {"type": "function"}, '"none", "auto", "required"'),
        (TOOLS, {"type": "allowed_tools", "function": {"name": "now"}}, '"none", "auto", "required"'),
        (TOOLS, {"type": "function", "function": {"name": 3}}, '"none", "auto", "required"'),
        (TOOLS, named("fly"), "'fly', which is not among the tools"),
        ([], "required", "needs tools"),
        ([], named("now"), "needs tools"),
    ],
)
def test_bad_choices_are_refused(tools: list[Any], choice: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        make_parser(reasoning=None, tools="hermes", tool_schemas=tools, tool_choice=choice)
    with pytest.raises(RequestError, match=complaint):
        forced_call_schema(tools, choice, "hermes")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_no_schema_where_no_call_is_forced(choice: Any) -> None:
    with pytest.raises(RequestError, match="forces no call"):
        forced_call_schema(TOOLS, choice, "hermes")


def test_unknown_style_is_refused() -> None:
    with pytest.raises(ConfigError, match="hermes, lfm2, llama3_json"):
        forced_call_schema(TOOLS, "required", "xml")


@pytest.mark.parametrize(
    ("style", "key"), [("hermes", "arguments"), ("llama3_json", "parameters"), (None, "arguments")]
)
def test_schema_takes_the_calls_and_nothing_else(style: str | None, key: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    path = {"x": 1, "next": {"x": 2}}
    good = [{"name": "move", key: {"at": path}}, {"name": "now", key: {}}, {"name": "stay", key: {}}]
    bad = [
        {"name": "move", key: {"at": {"x": 1, "next": {"x": "2"}}}},
        {"name": "move", key: {"at": path, "const": 1}},
        {"name": "now", key: {"a": 1}},
        {"name": "fly", key: {}},
        {"name": "now"},
        {"name": "now", key: {}, "more": 1},
        {"name": "now", "other": {}},
    ]
    any_of_them = jsonschema.Draft202012Validator(forced_call_schema(TOOLS, "required", style))
    assert [any_of_them.is_valid(call) for call in good + bad] == [True] * 3 + [False] * 7
    the_one = jsonschema.Draft202012Validator(forced_call_schema(TOOLS, named("move"), style))
    assert [the_one.is_valid(call) for call in good] == [True, False, False]
    assert not any(map(the_one.is_valid, bad))
    for call in good:
        message = parse_forced_call(json.dumps(call))
        assert [(each.name, json.loads(each.arguments)) for each in message.tool_calls] == [(call["name"], call[key])]


@pytest.mark.parametrize("choice", ["required", named("move"), named("now")])
@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:2]])
def test_schema_compiles(choice: Any, tools: list[Any]) -> None:
    matcher = pytest.importorskip("llguidance").LLMatcher
    grammar = matcher.grammar_from_json_schema(forced_call_schema(tools, choice, "hermes"))
    assert matcher.validate_grammar(grammar) == ""


def test_the_schema_of_content_or_calls_takes_both() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    person = {
        "$id": "https://example.org/person",
        "type": "object",
        "properties": {"name": {"$ref": "#/$defs/text"}, "friend": {"$ref": "#"}},
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"text": {"type": "string"}},
    }
    schema = call_or_content_schema(person, TOOLS)
    good = [{"name": "Bo", "friend": {"name": "now"}}, {"name": "move", "arguments": {"at": {"x": 1}}}, {"name": "now"}]
    bad = [{"name": 1}, {"name": "Bo", "friend": {}}, {"name": "move", "arguments": {"at": 1}}, {"arguments": {}}, {}]
    validator = jsonschema.Draft202012Validator(schema)
    assert [validator.is_valid(value) for value in good + bad] == [True] * 3 + [False] * 5
    matcher = pytest.importorskip("llguidance").LLMatcher
    assert matcher.validate_grammar(matcher.grammar_from_json_schema(schema)) == ""


def test_tools_are_left_as_they_were() -> None:
    before = json.dumps(TOOLS)
    forced_call_schema(TOOLS, "required", "hermes")
    assert json.dumps(TOOLS) == before
