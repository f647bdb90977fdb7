"""Tool calls are separated from text in the formats of Hermes, Qwen and Llama, and in forced calls."""

import json
import re

import pytest

from nanovllm.errors import ConfigError
from nanovllm.server.parsers import (
    ChatParser,
    ContentDelta,
    ToolCallArguments,
    ToolCallStart,
    final_finish_reason,
    make_parser,
    parse_forced_call,
)
from nanovllm.server.parsers.choice import ToolChoice

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "now", "write-file")]
CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Zürich"}}'


def parser(tools: str | None, reasoning: str | None = None, choice: ToolChoice = "auto") -> ChatParser:
    return make_parser(reasoning=reasoning, tools=tools, tool_schemas=TOOLS, tool_choice=choice)


def parts(parser: ChatParser, text: str) -> tuple[str | None, list[tuple[str, str]]]:
    message = parser.parse(text)
    return message.content, [(call.name, call.arguments) for call in message.tool_calls]


WEATHER = ("weather", '{"city": "Zürich"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", None, [WEATHER]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", None, [WEATHER, WEATHER]),
        (f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n", "Let me see.", [WEATHER]),
        (f"Before.\n<tool_call>{CALL}</tool_call>\nAfter.", "Before.\n\nAfter.", [WEATHER]),
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', None, [("now", "{}")]),
        ('<tool_call>{"name": "now"}</tool_call>', None, [("now", "{}")]),
        ('<tool_call>{"arguments": {"a": {}}, "name": "now"}</tool_call>', None, [("now", '{"a": {}}')]),
        (f"<tool_call>{LLAMA_CALL}</tool_call>", None, [WEATHER]),
        (f"<tool_call>{CALL}", None, [WEATHER]),
        (f"<tool_call>{CALL}\n</tool_", None, [WEATHER]),
        (f"<tool_call>{CALL}}}</tool_call>", "}</tool_call>", [WEATHER]),
        (f"<tool_call>\n{CALL[:-1]}", None, [WEATHER]),
        (f"<tool_call>\n{CALL[:-1]}\n</tool_call>\nDone.", "\nDone.", [WEATHER]),
        (f"<tool_call>\n{CALL[:-4]}", None, [("weather", '{"city": "Züric')]),
        ('<tool_call>{"name": "now", "arguments": {"a": 1', None, [("now", '{"a": ')]),
        ('<tool_call>{"name": "now", "arguments": {}, "arguments": {"a": 1}}', None, [("now", "{}")]),
        ('<tool_call>{"name": "now", "parameters": {"b": 2}, "arguments": {"a": 1}}', None, [("now", '{"b": 2}')]),
        (f"A\n<tool_call>\n{CALL[:20]}\n", f"A\n<tool_call>\n{CALL[:20]}\n", []),
        ("Ends in <tool_ca", "Ends in <tool_ca", []),
        ("<tool_call>\n", "<tool_call>\n", []),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('<tool_call>["weather"]</tool_call>', '<tool_call>["weather"]</tool_call>', []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        ('<tool_call>{"name": "now", "arguments": [1]}', '<tool_call>{"name": "now", "arguments": [1]}', []),
        ('A.\n<tool_call>{"name": "now", "arguments": {"a": NaN}}', "A.\nNaN}}", [("now", '{"a": ')]),
        ('<tool_call>{"name": "unknown", "arguments": {}}', '<tool_call>{"name": "unknown", "arguments": {}}', []),
        (f'<tool_call>{{"name": <tool_call>{CALL}</tool_call>', '<tool_call>{"name":', [WEATHER]),
        (f"Plain JSON: {CALL}", f"Plain JSON: {CALL}", []),
        ("a < b\n", "a < b\n", []),
        ("", "", []),
    ],
)
def test_hermes(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert parts(parser("hermes"), text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (LLAMA_CALL, None, [WEATHER]),
        (f"\n\n{LLAMA_CALL}\n", None, [WEATHER]),
        (f"<|python_tag|>{LLAMA_CALL}", None, [WEATHER]),
        (f"{LLAMA_CALL}; {LLAMA_CALL}", None, [WEATHER, WEATHER]),
        (f"{LLAMA_CALL};\n<|python_tag|>{LLAMA_CALL};", None, [WEATHER, WEATHER]),
        (f"I look.<|python_tag|>{LLAMA_CALL}", "I look.", [WEATHER]),
        ('{"type": "function", "name": "now", "parameters": {}}', None, [("now", "{}")]),
        (CALL, None, [WEATHER]),
        (f"Sure: {LLAMA_CALL}", f"Sure: {LLAMA_CALL}", []),
        (f"{LLAMA_CALL}; and so on", "; and so on", [WEATHER]),
        (f"{LLAMA_CALL} and so on", " and so on", [WEATHER]),
        (f"{LLAMA_CALL[:-1]}", None, [WEATHER]),
        (f"{LLAMA_CALL}; {LLAMA_CALL[:-1]}", None, [WEATHER, WEATHER]),
        (f"{LLAMA_CALL}; {LLAMA_CALL[:19]}", f"; {LLAMA_CALL[:19]}", [WEATHER]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("{x} is a set", "{x} is a set", []),
        ('<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
        ("<|python", "<|python", []),
        ("Hello.\n", "Hello.\n", []),
        (" \n", " \n", []),
    ],
)
def test_llama3_json(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert parts(parser("llama3_json"), text) == (content, calls)


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "</tool_call>"},
        {"text": "<tool_call>{}</tool_call>"},
        {"text": 'a "quoted" \\ } {{ ] [ backslash \\" \n\t'},
        {"text": "日本語 🦊 é \u2028 \x7f"},
        {"a": {"b": {"c": [{}, [[]], {"d": "}"}]}}, "n": -1.5e-7, "t": True, "z": None},
        {"name": "weather", "arguments": {"name": "inner"}},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    ("tools", "shape"),
    [("hermes", '<tool_call>\n{"name": "write-file", "arguments": %s}\n</tool_call>')]
    + [("llama3_json", '{"name": "write-file", "parameters": %s}')],
)
def test_arguments_are_returned_unchanged(
    tools: str, shape: str, ascii_only: bool, arguments: dict[str, object]
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    assert parts(parser(tools), shape % written) == (None, [("write-file", written)])


@pytest.mark.parametrize("arguments", ['{"big": 1e400}', '{"half": "\\ud800"}', '{"long": ' + "9" * 5000 + "}"])
def test_arguments_that_python_cannot_encode_are_returned_unchanged(arguments: str) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    assert parts(parser("hermes"), text) == (None, [("now", arguments)])


def test_arguments_and_text_stream_without_delay() -> None:
    streamed = parser("hermes")
    assert streamed.feed("Wait") == [ContentDelta("Wait")]
    assert streamed.feed(" a <") == [ContentDelta(" a")]
    assert streamed.feed("b") == [ContentDelta(" <b")]
    assert streamed.feed('\n<tool_call>\n{"name": "weather", "arguments": ') == []
    start, arguments = streamed.feed('{"city": "Z\\u00')
    assert isinstance(start, ToolCallStart) and (start.index, start.name) == (0, "weather")
    assert arguments == ToolCallArguments(0, '{"city": "Z')
    assert streamed.feed("fcr") == [ToolCallArguments(0, "\\u00fcr")]
    assert streamed.feed('ich"}}') == [ToolCallArguments(0, 'ich"}')]
    assert streamed.feed("\n</tool_call>\n<tool") == []
    events = streamed.feed(f"_call>{CALL}")
    assert [event.index for event in events if isinstance(event, ToolCallStart | ToolCallArguments)] == [1, 1]
    assert streamed.feed("</tool_call>", finished=True) == []


def test_text_that_cannot_become_a_call_is_returned_at_once() -> None:
    assert parser("llama3_json").feed("Hi") == [ContentDelta("Hi")]
    assert parser("llama3_json").feed("{x") == [ContentDelta("{x")]
    assert parser("hermes").feed("<tool_call>x") == [ContentDelta("<tool_call>x")]


def test_calls_follow_the_reasoning_and_are_ignored_inside_it() -> None:
    message = parser("hermes", "qwen3").parse(
        f"<think>\nMaybe <tool_call>{CALL}</tool_call>\n</think>\n\nSo:\n<tool_call>{CALL}</tool_call>"
    )
    assert message.reasoning == f"Maybe <tool_call>{CALL}</tool_call>"
    assert (message.content, len(message.tool_calls)) == ("So:", 1)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (f"<think>\nI call.\n<tool_call>\n{CALL}\n</tool_call>", "I call.", None, 1),
        (f"<think><tool_call>{CALL}</tool_call><tool_call>{CALL}", None, None, 2),
        (f"<think>I call.\n<tool_call>{CALL[:-1]}", "I call.", None, 1),
        (f"<think>I call.\n<tool_call>{CALL[:20]}", f"I call.\n<tool_call>{CALL[:20]}", "", 0),
        ("<think>I could <tool_call>.\n", "I could <tool_call>.\n", "", 0),
        (f"<think>I <tool_call>{CALL}</tool_call></think>No.", f"I <tool_call>{CALL}</tool_call>", "No.", 0),
    ],
)
def test_calls_after_reasoning_that_is_not_closed(
    text: str, reasoning: str | None, content: str | None, num_calls: int
) -> None:
    message = parser("hermes", "qwen3").parse(text)
    assert (message.reasoning, message.content, len(message.tool_calls)) == (reasoning, content, num_calls)


def test_ids_are_new_each_time() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 2
    ids = [call.id for _ in range(2) for call in parser("hermes").parse(text).tool_calls]
    assert len(set(ids)) == 4
    assert all(re.fullmatch(r"call_[A-Za-z0-9_-]{24}", id) for id in ids)


def test_choice_none_and_no_tools_leave_everything_as_content() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert parts(parser("hermes", choice="none"), text) == (text, [])
    without = make_parser(reasoning=None, tools="hermes", tool_schemas=(), tool_choice=None)
    assert parts(without, text) == (text, [])


@pytest.mark.parametrize("tools", [None, "hermes", "llama3_json"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_are_the_bare_object(tools: str | None, choice: ToolChoice) -> None:
    forced = parser(tools, reasoning="deepseek_r1", choice=choice)
    for text in (CALL, LLAMA_CALL, f" {CALL}\n"):
        assert parts(forced, text) == (None, [WEATHER])
        assert parse_forced_call(text).tool_calls[0].arguments == WEATHER[1]
    assert parts(forced, CALL[:20]) == (CALL[:20], [])
    assert parts(forced, CALL[:-4]) == (None, [("weather", '{"city": "Züric')])


def test_named_choice_takes_no_other_tool() -> None:
    forced = parser(None, choice={"type": "function", "function": {"name": "now"}})
    assert parts(forced, CALL) == (CALL, [])


@pytest.mark.parametrize("choice", ["auto", None])
def test_auto_without_a_tool_parser_takes_the_form_of_forced_calls(choice: ToolChoice) -> None:
    auto = parser(None, choice=choice)
    for text in (CALL, LLAMA_CALL, f" {CALL}\n"):
        assert parts(auto, text) == (None, [WEATHER])
    assert parts(auto, f"{CALL}\nDone.") == ("\nDone.", [WEATHER])
    for text in ("Hello {you}", CALL[:20], '{"name": "unknown", "arguments": {}}', '{"city": "Zürich"}', "[1]"):
        assert parts(auto, text) == (text, [])
    thinking = parser(None, reasoning="qwen3", choice=choice).parse(f"<think>Hm.</think>{CALL}")
    assert (thinking.reasoning, thinking.content, len(thinking.tool_calls)) == ("Hm.", None, 1)


@pytest.mark.parametrize(
    ("pieces", "content", "calls"),
    [
        (['{"name": "now", "arguments": ', '{"a": 1', "}}"], [], [("now", ['{"a": ', "1}"])]),
        (['{"answer"', ': "a', ' b"}'], ['{"answer"', ': "a', ' b"}'], []),
        (['{"name": "N', 'ow"', "}"], ['{"name": "Now"', "}"], []),
        (['{"name": "now", "at"', ": 1}"], ['{"name": "now", "at"', ": 1}"], []),
        (['{"name": "now"', "}"], ['{"name": "now"}'], []),
        (["[1", ", 2]"], ["[1", ", 2]"], []),
    ],
)
def test_a_message_that_follows_a_grammar_is_content_or_a_call(
    pieces: list[str], content: list[str], calls: list[tuple[str, list[str]]]
) -> None:
    made = make_parser(reasoning=None, tools="mistral", tool_schemas=TOOLS, tool_choice="auto", is_object=True)
    events = [event for piece in pieces for event in made.feed(piece)] + made.feed("", finished=True)
    assert [event.text for event in events if isinstance(event, ContentDelta)] == content
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    texts = [event.text for event in events if isinstance(event, ToolCallArguments)]
    assert [(start.name, texts) for start in starts] == calls
    assert all(len(start.id) == 9 for start in starts)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'qwen'.*hermes, lfm2, llama3_json"):
        parser("qwen")


def test_parse_does_not_depend_on_what_was_fed() -> None:
    used = parser("hermes")
    used.feed("<tool_call>{")
    assert used.parse("Hello").content == "Hello"


@pytest.mark.parametrize(
    ("reason", "has_calls", "final"),
    [("stop", True, "tool_calls"), ("stop", False, "stop"), ("length", True, "length"), (None, True, None)],
)
def test_finish_reason(reason: str | None, has_calls: bool, final: str | None) -> None:
    assert final_finish_reason(reason, has_tool_calls=has_calls) == final
