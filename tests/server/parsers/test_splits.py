"""However a completion is cut into deltas, its events add up to the same message, and that message is correct."""

import json
import re
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nanovllm.server.parsers import ChatParser, ParsedMessage, collect, make_parser
from nanovllm.server.parsers.json_object import ObjectScanner, Status

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALL = '{"name": "f", "arguments": {}}'
PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "</", "<tool_", "</thi", ";"]
PIECES += ["\n", "\n\n", " ", "Hello", "é🦊", "{", "}", '"', "\\", ":", "null", "{}"]
PIECES += [
    '{"name": "f"',
    ', "arguments": {',
    ', "a": 1}',
    CALL,
    '{"name":"g","parameters":{"a":"</tool_call>","b":[{"c":"}\\""}]}}',
]
PIECES += [
    '{"name": "h", "arguments": {}}',
    '{"name": "f", "arguments": {"x": "<tool_call>',
    '{"name": "f", "arguments"',
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def stream(parser: ChatParser, pieces: list[str], finish_with_last: bool) -> ParsedMessage:
    *before, last = pieces if finish_with_last else [*pieces, ""]
    events = [event for piece in before for event in parser.feed(piece)]
    return collect(events + parser.feed(last, finished=True))


def without_ids(message: ParsedMessage) -> tuple[Any, ...]:
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("tools", "choice", "is_object"),
    [
        (None, "none", False),
        ("hermes", "auto", False),
        ("llama3_json", "auto", False),
        (None, "required", False),
        ("hermes", "auto", True),
    ],
)
@example(text='{"name": "f"}', places=[], finish_with_last=False)
@example(text=f"{CALL}; <|python_tag|>{CALL};", places=[], finish_with_last=True)
@example(text=f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_", places=[], finish_with_last=False)
@example(text=f"<think>a\n\n<tool_call>\n{CALL}", places=[9, 12], finish_with_last=False)
@settings(deadline=None)
@given(text=texts, places=st.lists(st.integers(0, 400), max_size=8), finish_with_last=st.booleans())
def test_any_split_gives_the_same_message(
    reasoning: str | None,
    tools: str | None,
    choice: str,
    is_object: bool,
    text: str,
    places: list[int],
    finish_with_last: bool,
) -> None:
    parser = make_parser(reasoning=reasoning, tools=tools, tool_schemas=TOOLS, tool_choice=choice, is_object=is_object)
    whole = without_ids(parser.parse(text))
    assert without_ids(stream(parser.new_copy(), cut(text, places), finish_with_last)) == whole
    assert without_ids(stream(parser.new_copy(), list(text) or [""], finish_with_last)) == whole
    # a call that names no arguments has none
    assert all(arguments == "{}" or (arguments in text and begins_object(arguments)) for _, arguments in whole[2])


def begins_object(arguments: str) -> bool:
    """Whether the arguments are a JSON object, or the beginning of one in a call that was cut or is malformed."""
    return arguments.startswith("{") and ObjectScanner(0).scan(arguments) is not Status.INVALID


def hermes_by_hand(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The same rules, applied to the complete text with Python's json parser."""
    content, calls = "", []
    while "<tool_call>" in text:
        before, text = text.split("<tool_call>", 1)
        content += before
        try:
            call, end = json.JSONDecoder().raw_decode(text.lstrip())
            known = isinstance(call, dict) and call.get("name") in ("f", "g")
            known = known and isinstance(call.get("arguments", call.get("parameters", {})), dict)
        except ValueError:
            known = False
        if not known:
            content += "<tool_call>"
            continue
        calls.append((call["name"], call.get("arguments", call.get("parameters", {}))))
        after = text.lstrip()[end:]
        rest = after.lstrip()
        is_cut_short = "</tool_call>".startswith(rest)
        text = "" if is_cut_short else rest.removeprefix("</tool_call>") if rest.startswith("</tool_call>") else after
    content += text
    return (content.rstrip() if calls else content), calls


@settings(deadline=None)
@given(texts)
@example('<tool_call>{"name": "f", "arguments": {"x": "<tool_call>{"name": "f", "arguments": {}}')
@example('<tool_call>{"name": "f", "arguments":null}')
def test_hermes_agrees_with_a_plain_reading(text: str) -> None:
    parser = make_parser(reasoning=None, tools="hermes", tool_schemas=TOOLS, tool_choice="auto")
    message = parser.parse(text)
    assume(all(ObjectScanner(0).scan(call.arguments) is Status.COMPLETE for call in message.tool_calls))
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert (message.content or "", calls) == hermes_by_hand(text)


@settings(deadline=None)
@given(texts, st.booleans())
def test_reasoning_loses_only_tags_and_newlines(text: str, inside: bool) -> None:
    parser = make_parser(
        reasoning="qwen3", tools=None, tool_schemas=(), tool_choice=None, prompt_opens_reasoning=inside
    )
    message = parser.parse(text)
    kept = f"{message.reasoning or ''}{message.content}"
    for tag in ("<think>", "</think>"):
        if kept.count(tag) < text.count(tag):
            text = text.replace(tag, "", 1)
    assert re.sub(r"\s", "", kept) == re.sub(r"\s", "", text)
