"""Tool calls in the formats of Qwen3.5, GLM, Mistral, Gemma 4 and LFM2: exact examples, and what is not a call."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.server.parsers import TOOL_PARSERS, ChatParser, ToolCallArguments, ToolCallStart, make_parser
from tests.server.parsers.test_splits import begins_object, cut, stream, without_ids

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "hot": {"type": "boolean"},
    "where": {"type": "object"},
    "unit": {"type": ["string", "null"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "now-2")]


def parser(tools: str) -> ChatParser:
    return make_parser(reasoning=None, tools=tools, tool_schemas=TOOLS, tool_choice="auto")  # type: ignore[return-value]


def parse(tools: str, text: str) -> tuple[str | None, list[tuple[str, Any]]]:
    message = parser(tools).parse(text)
    return message.content, [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


BERN, NOW = ("weather", {"city": "Bern"}), ("now-2", {})
QWEN = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
QWEN_NOW = "<tool_call>\n<function=now-2>\n</function>\n</tool_call>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"
GLM_47 = "<tool_call>weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>"
MISTRAL = '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}'
MISTRAL_LIST = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}}]'
GEMMA = '<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>'
FUNCTION_GEMMA = "<start_function_call>call:weather{city:<escape>Bern<escape>}<end_function_call>"
LFM = '<|tool_call_start|>[weather(city="Bern")]<|tool_call_end|>'

STREAMED = ("qwen3_coder", "qwen3_xml", "glm45", "glm47", "mistral")  # arguments are sent as they are generated
CALLS = [
    ("qwen3_coder", QWEN),
    ("qwen3_xml", QWEN),
    ("glm45", GLM),
    ("glm47", GLM_47),
    ("mistral", MISTRAL),
    ("mistral", MISTRAL_LIST),
    ("gemma4", GEMMA),
    ("functiongemma", FUNCTION_GEMMA),
    ("lfm2", LFM),
]


def qwen(**values: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=weather>\n{written}</function>\n</tool_call>"


def glm(**values: str) -> str:
    written = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>weather\n{written}</tool_call>"


@pytest.mark.parametrize(("tools", "call"), CALLS)
def test_one_call_and_two(tools: str, call: str) -> None:
    assert parse(tools, call) == (None, [BERN])
    assert parse(tools, f"{call}\n{call}") == (None, [BERN, BERN])
    assert parse(tools, f"I look.\n\n{call}\n") == ("I look.", [BERN])
    assert parse(tools, f"Before.\n{call}\nAfter.") == ("Before.\n\nAfter.", [BERN])


@pytest.mark.parametrize(("tools", "call"), CALLS)
def test_a_call_that_is_cut_is_not_lost(tools: str, call: str) -> None:
    text = f"I look. {call}"
    for length in range(len(text)):
        message = parser(tools).parse(text[:length])
        if message.tool_calls:
            (call,) = message.tool_calls
            assert message.content == "I look." and call.name == "weather"
            assert call.arguments and '{"city":"Bern"}'.startswith(call.arguments.replace(" ", ""))
        else:
            assert message.content == text[:length]
    unknown = text.replace("weather", "whether")
    assert parse(tools, unknown) == (unknown, [])


@pytest.mark.parametrize(("tools", "call"), CALLS)
def test_the_name_is_streamed_before_the_arguments(tools: str, call: str) -> None:
    streamed = parser(tools)
    events = [event for char in f"Hm. {call}" for event in streamed.feed(char)] + streamed.feed("", finished=True)
    number = next(number for number, event in enumerate(events) if isinstance(event, ToolCallStart))
    assert "".join(event.text for event in events[:number]) == "Hm."  # type: ignore[union-attr]
    start, *pieces = events[number:]
    assert isinstance(start, ToolCallStart) and start.name == "weather"
    assert all(isinstance(piece, ToolCallArguments) and piece.text for piece in pieces)
    texts = [piece.text for piece in pieces]  # type: ignore[union-attr]
    assert json.loads("".join(texts)) == {"city": "Bern"}
    if tools in STREAMED:
        assert all(letter in texts for letter in "Bern")
    else:
        assert len(texts) == 1


@pytest.mark.parametrize(("tools", "write"), [("qwen3_coder", qwen), ("glm45", glm)])
def test_values_stream_if_they_are_strings(tools: str, write: Any) -> None:
    made = parser(tools)
    text = write(days="12", city='a"b\n\nc', unit="km", more="1")
    pieces = [event.text for char in text for event in made.feed(char) if isinstance(event, ToolCallArguments)]
    assert "".join(pieces) == '{"days": 12, "city": "a\\"b\\n\\nc", "unit": "km", "more": 1}'
    assert {"a", '\\"', "b", "12", '"km"'} <= set(pieces), "only a city is a string in any case"


def test_a_value_without_an_end_is_cut() -> None:
    message = parser("qwen3_coder").parse(QWEN.replace("\n</parameter>", ""))
    (call,) = message.tool_calls
    assert (message.content, call.arguments) == (None, '{"city": "Bern\\n</function>\\n</tool_call>')
    message = parser("qwen3_coder").parse(qwen(days="12").replace("\n</parameter>", ""))
    assert [call.arguments for call in message.tool_calls] == ['{"days": ']


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_ids_of_mistral_are_those_its_templates_take(choice: str) -> None:
    made = make_parser(reasoning=None, tools="mistral", tool_schemas=TOOLS, tool_choice=choice)
    text = '{"name": "weather", "arguments": {}}'
    ids = [made.parse(text if choice == "required" else MISTRAL).tool_calls[0].id for _ in range(9)]
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", id) for id in ids) and len(set(ids)) == 9


@pytest.mark.parametrize(("tools", "write"), [("qwen3_coder", qwen), ("glm45", glm)])
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "7", "7"),
        ("city", "true", "true"),
        ("city", '"Bern"', '"Bern"'),
        ("city", " \n a\n\nb ", " \n a\n\nb "),
        ("city", "", ""),
        ("city", "</tool_call><tool_call>", "</tool_call><tool_call>"),
        ("city", "</function>", "</function>"),
        ("city", "a</parameter>b</arg_value>c", "a</parameter>b</arg_value>c"),
        ("days", "7", 7),
        ("days", "-7\n", -7),
        ("days", "7.5", 7.5),
        ("days", "a week", "a week"),
        ("days", "007", "007"),
        ("hot", "true", True),
        ("hot", "False", False),
        ("hot", "1, 2", "1, 2"),
        ("where", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("where", "{a: 1}", "{a: 1}"),
        ("where", "None", None),
        ("unit", "null", None),
        ("unit", "None", None),
        ("unit", "7", "7"),
        ("undeclared", "7", 7),
        ("undeclared", "[1]", [1]),
        ("undeclared", "seven", "seven"),
        ("undeclared", '7}, "x": {', '7}, "x": {'),
        ("undeclared", '1, "": 2', '1, "": 2'),
        ("undeclared", "NaN", "NaN"),
    ],
)
def test_values_have_the_declared_types(tools: str, write: Any, name: str, text: str, value: Any) -> None:
    assert parse(tools, write(**{name: text})) == (None, [("weather", {name: value})])


DEFINITIONS = {"Color": {"enum": ["red", "5"]}, "Point": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/Color"}, "5", "5"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"$ref": "#/$defs/None"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "description": "d"}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5.5", "5.5"),
        ({"oneOf": [{"type": "string"}, {}]}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"enum": [5, None]}, "None", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "number"}, "1e400", "1e400"),
        (True, "5", 5),
    ],
)
def test_types_of_schemas(schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    made = make_parser(reasoning=None, tools="qwen3_coder", tool_schemas=[tool], tool_choice="auto")
    (call,) = made.parse(qwen(a=text)).tool_calls
    if text == "1e400":  # passed on as it was generated: Python would make it Infinity
        assert call.arguments == '{"a": 1e400}'
    else:
        assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        ("qwen3_coder", QWEN_NOW, None, [NOW]),
        ("qwen3_coder", "<tool_call><function=now-2></function></tool_call>", None, [NOW]),
        ("qwen3_coder", QWEN.removesuffix("</tool_call>"), None, [BERN]),
        ("qwen3_coder", f"I look.\n{QWEN.removeprefix('<tool_call>')}", "I look.", [BERN]),
        ("qwen3_coder", "<function=whatever>\n<function=", ..., []),
        ("qwen3_coder", '<tool_call>\n{"name": "now-2"}\n</tool_call>', ..., []),
        ("qwen3_coder", QWEN.replace("<parameter", "and <parameter"), ..., []),
        ("qwen3_coder", f"<tool_call>no<tool_call>{QWEN}", "<tool_call>no<tool_call>", [BERN]),
        ("glm45", "<tool_call>now-2\n</tool_call>", None, [NOW]),
        ("glm45", "<tool_call>now-2</tool_call>", None, [NOW]),
        ("glm45", "<tool_call>now-2 please</tool_call>", ..., []),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key></tool_call>", ..., []),
        ("mistral", "[TOOL_CALLS]now-2{}", None, [NOW]),
        ("mistral", "[TOOL_CALLS]now-2[CALL_ID]a1B2c3D4e[ARGS]{}", None, [NOW]),
        ("mistral", '[TOOL_CALLS] [{"name": "now-2", "arguments": {}, "id": "a1B2c3D4e"}]', None, [NOW]),
        ("mistral", '[TOOL_CALLS][ {"name": "now-2"} , {"name": "now-2"} ]', None, [NOW, NOW]),
        ("mistral", '[TOOL_CALLS][{"name": "now-2"}, {"name": "never"}]', ', {"name": "never"}]', [NOW]),
        ("mistral", '[TOOL_CALLS][{"name": "now-2"}; {"name": "now-2"}]', '; {"name": "now-2"}]', [NOW]),
        ("mistral", '[TOOL_CALLS][{"name": "now-2"}', None, [NOW]),
        ("mistral", '[TOOL_CALLS][{"name": "now-2"}, {"name', None, [NOW]),
        ("mistral", "[TOOL_CALLS][]", ..., []),
        ("mistral", "[TOOL_CALLS]now-2[CALL_ID][ARGS]{}", ..., []),
        ("mistral", "[TOOL_CALLS]now-2[ARGS][1]", ..., []),
        ("mistral", "[TOOL_CALLS]now-2[ARGS]{}{}", "{}", [NOW]),
        ("gemma4", "<|tool_call>call:now-2{}<tool_call|>", None, [NOW]),
        ("gemma4", "<|tool_call>call:now-2{}", None, [NOW]),
        ("gemma4", "<|tool_call>now-2{}<tool_call|>", ..., []),
        ("gemma4", '<|tool_call>call:now-2{a:<|"|>}{<|"|>}', None, [("now-2", {"a": "}{"})]),
        (
            "gemma4",
            "<|tool_call>call:now-2{ a : [ 1 , {b:true} ], c:None }",
            None,
            [("now-2", {"a": [1, {"b": True}], "c": None})],
        ),
        (
            "gemma4",
            '<|tool_call>call:now-2{<|"|>a b<|"|>:1.5,c:at 12:30}',
            None,
            [("now-2", {"a b": 1.5, "c": "at 12:30"})],
        ),
        ("gemma4", '<|tool_call>call:now-2{a:<|"|>"\\\n<|"|>}', None, [("now-2", {"a": '"\\\n'})]),
        ("gemma4", "<|tool_call>call:now-2{a:1,}<tool_call|>", ..., []),
        ("gemma4", "<|tool_call>call:now-2{a:[1}]<tool_call|>", ..., []),
        ("gemma4", "<|tool_call>call:now-2{a}<tool_call|>", ..., []),
        ("gemma4", '<|tool_call>call:now-2{a:<|"|>b}<tool_call|>', ..., []),
        ("lfm2", "<|tool_call_start|>[now-2(), now-2( )]<|tool_call_end|>", None, [NOW, NOW]),
        (
            "lfm2",
            "<|tool_call_start|>[now-2(a='it\\'s', b=\"\\x41\\u00e9\n\\d\", c=(1, -2.5), d={'e': [True, None]})]"
            "<|tool_call_end|>",
            None,
            [("now-2", {"a": "it's", "b": "Aé\n\\d", "c": [1, -2.5], "d": {"e": [True, None]}})],
        ),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", ..., []),
        ("lfm2", "<|tool_call_start|>now-2()<|tool_call_end|>", ..., []),
        ("lfm2", "<|tool_call_start|>[now-2(), never()]<|tool_call_end|>", ..., []),
        ("lfm2", "<|tool_call_start|>[now-2(1)]<|tool_call_end|>", ..., []),
        ("lfm2", "<|tool_call_start|>[now-2(a=b)]<|tool_call_end|>", ..., []),
        ("lfm2", "<|tool_call_start|>[now-2(a=__import__('os'))]<|tool_call_end|>", ..., []),
        ("lfm2", "<|tool_call_start|>[now-2(a='b)]<|tool_call_end|>", ..., []),
        ("lfm2", "<|tool_call_start|>[now-2()]; [now-2()]<|tool_call_end|>", ..., []),
    ],
)
def test_forms_of_calls(tools: str, text: str, content: Any, calls: list[Any]) -> None:
    """`content` ...: the whole text."""
    assert parse(tools, text) == (text if content is ... else content, calls)
    assert without_ids(stream(parser(tools), list(text), True)) == without_ids(parser(tools).parse(text))


PIECES = {
    "qwen3_coder": [QWEN, QWEN_NOW, "<tool_call>", "<function=weather>", "<parameter=city>", "</parameter>"]
    + ["</function>", "</tool_call>", "<parameter=", "</para"],
    "glm45": [GLM, GLM_47, "<tool_call>", "weather", "<arg_key>", "city", "</arg_key>", "<arg_value>", "</arg_value>"]
    + ["</tool_call>", "</arg"],
    "mistral": [
        MISTRAL,
        MISTRAL_LIST,
        "[TOOL_CALLS]",
        "weather",
        "[ARGS]",
        "[CALL_ID]",
        "{}",
        '{"city": 1}',
        "[",
        "]",
        ",",
    ]
    + ['{"name": "weather"}', "[AR", "[CAL"],
    "gemma4": [
        GEMMA,
        "<|tool_call>",
        "call:",
        "weather",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '<|"|>',
        "<tool_call|>",
        "city:",
    ]
    + ["1", '<|"', "cal"],
    "lfm2": [LFM, "<|tool_call_start|>", "[", "]", "weather(", ")", "city=", "'", '"', "\\", ",", "1", "{", "}", ":"]
    + ["<|tool_call_end|>", "<|tool_call_"],
}


@pytest.mark.parametrize("tools", PIECES)
@settings(deadline=None)
@given(data=st.data(), places=st.lists(st.integers(0, 400), max_size=8), finish_with_last=st.booleans())
def test_any_split_gives_the_same_message(tools: str, data: Any, places: list[int], finish_with_last: bool) -> None:
    pieces = [*PIECES[tools], "\n", " ", "é🦊", "Hello"]
    text = data.draw(st.lists(st.sampled_from(pieces), max_size=12).map("".join))
    whole = without_ids(parser(tools).parse(text))
    assert without_ids(stream(parser(tools), cut(text, places), finish_with_last)) == whole
    assert without_ids(stream(parser(tools), list(text) or [""], finish_with_last)) == whole
    for _, arguments in whole[2]:
        assert begins_object(arguments) if tools in STREAMED else isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("tools", PIECES)
@settings(deadline=None)
@given(data=st.data())
def test_text_without_calls_is_unchanged(tools: str, data: Any) -> None:
    starts = [start for start in (TOOL_PARSERS[tools].opener, TOOL_PARSERS[tools].bare_start) if start]
    pieces = [piece for piece in PIECES[tools] if not any(start in piece for start in starts)]
    pieces += [start[:-1] for start in starts] + ["\n", " ", "Hello"]
    texts = st.lists(st.sampled_from(pieces), max_size=12).map("".join)
    text = data.draw(texts.filter(lambda text: not any(start in text for start in starts)))
    assert without_ids(parser(tools).parse(text)) == (None, text, [])


@pytest.mark.parametrize(
    ("tools", "form"),
    [
        ("qwen3_coder", "<tool_call><function=weather><parameter=where>%s</parameter></function>"),
        ("mistral", '[TOOL_CALLS]weather{"where": %s}'),
        ("gemma4", "<|tool_call>call:weather{where:%s}"),
        ("lfm2", "<|tool_call_start|>[weather(where=%s)]<|tool_call_end|>"),
    ],
)
@pytest.mark.parametrize("value", ["[" * 20_000, "[" * 20_000 + "]" * 20_000, "(" * 20_000, "-" * 20_000])
def test_deep_nesting_needs_no_recursion(tools: str, form: str, value: str) -> None:
    message = parser(tools).parse(form % value)
    assert message.content is not None or len(message.tool_calls) == 1
