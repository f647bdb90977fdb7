"""Harmony, the format of gpt-oss: channels become reasoning, content and tool calls, however the text is cut."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.server.parsers import (
    HarmonyParser,
    ParsedMessage,
    ToolCallArguments,
    ToolCallStart,
    make_parser,
    open_message,
)
from nanovllm.server.parsers.harmony import TAGS, AnalysisTokenCounter
from nanovllm.text.chat_template import ChatTemplates
from tests.server.parsers.test_splits import TOOLS, cut, stream, without_ids

TEMPLATE = ChatTemplates({"default": (Path(__file__).parent / "data" / "harmony.jinja").read_text()})
QUESTION = {"role": "user", "content": "Well?"}
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
NEXT = "<|end|><|start|>assistant"
PIECES = [
    *TAGS,
    ANALYSIS,
    FINAL,
    CALL,
    NEXT,
    "<|",
    "<|cha",
    "|>",
    "<",
    "analysis",
    "final",
    " to=functions.g",
    " to=python",
]
PIECES += ["assistant", "\n", " ", "Hello", "é🦊", "{}", '{"a": "<|call|>"}', '{"a": {"b": [1, "}"]}}', "[1]", "{", '"']
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def parser(begun: str = "assistant", choice: str = "auto") -> HarmonyParser:
    made = make_parser(reasoning="harmony", tools="harmony", tool_schemas=TOOLS, tool_choice=choice, begun=begun)
    assert isinstance(made, HarmonyParser)
    return made


def parse(text: str, **settings: Any) -> tuple[Any, ...]:
    return without_ids(parser(**settings).parse(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{FINAL}Hello.", (None, "Hello.", [])),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Hello.<|return|>", ("Hm.", "Hello.", [])),
        (f"{ANALYSIS}Hm.{NEXT}{CALL}<|call|>", ("Hm.", None, [("f", '{"a": 1}')])),
        (f"{CALL}{NEXT}{CALL}", (None, None, [("f", '{"a": 1}')] * 2)),
        # the recipient beside the role; no type of the text
        (" to=functions.g<|channel|>commentary<|message|> {} <|call|>", (None, None, [("g", "{}")])),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c{NEXT}{FINAL}d", ("a\nb", "c\nd", [])),
        # what a user reads before a call
        (f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}", (None, "I look.", [("f", '{"a": 1}')])),
        # a tool of the model itself
        ("<|channel|>commentary to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
        # calls of unknown functions, and with arguments that are no object, are content
        ("<|channel|>commentary to=functions.h<|message|>{}", (None, "{}", [])),
        ("<|channel|>commentary to=functions.f<|message|>[1]", (None, "[1]", [])),
        # arguments that are cut or malformed
        (f'{FINAL}x{NEXT}<|channel|>commentary to=functions.f<|message|>{{"a": ', (None, "x", [("f", '{"a":')])),
        ("<|channel|>commentary to=functions.f<|message|> {a} b <|call|>", (None, None, [("f", "{a} b")])),
        (f"{ANALYSIS}Cut sho", ("Cut sho", "", [])),
        ("Hello.", (None, "Hello.", [])),
        ("<|channel|>anal", (None, "<|channel|>anal", [])),
        ("", (None, "", [])),
        # tags that cannot stand where they are
        (f"{FINAL}a<|message|>b", (None, "a<|message|>b", [])),
        (f"{ANALYSIS}a{FINAL}b", ("a", "b", [])),
    ],
)
def test_messages(text: str, expected: tuple[Any, ...]) -> None:
    assert parse(text) == expected


def test_without_tools_a_call_is_content() -> None:
    assert parse(CALL, choice="none") == (None, '{"a": 1}', [])


def test_the_prompt_may_end_within_a_message() -> None:
    begun = open_message(f"<|start|>user<|message|>Hi<|end|><|start|>assistant{FINAL}Hel")
    assert parse(f"lo.{NEXT}{FINAL}Yes", begun=begun) == (None, "lo.\nYes", [])
    assert parse("lo", begun="assistant<|channel|>anal" + "ysis<|message|>Hel") == ("lo", "", [])


def test_text_streams_as_it_comes() -> None:
    made = parser()
    events = [made.feed(piece) for piece in (ANALYSIS, "Hm", "m.<|en", "d|>", "<|start|>assistant", FINAL, "Hello")]
    texts = [[event.text for event in each] for each in events]  # type: ignore[union-attr]
    assert texts == [[], ["Hm"], ["m."], [], [], [], ["Hello"]]


def test_arguments_stream_as_they_come() -> None:
    made = parser()
    start, first = made.feed(CALL[:-4])
    assert isinstance(start, ToolCallStart) and (start.index, start.name) == (0, "f")
    assert first == ToolCallArguments(0, '{"a"')
    assert made.feed(": 1\n<|ca") == [ToolCallArguments(0, ": 1")]
    assert made.feed("b") == [ToolCallArguments(0, "\n<|cab")]
    assert made.feed("}\n<|call|>") == [ToolCallArguments(0, "}")]
    assert made.feed("", finished=True) == []


def test_the_prompt_may_end_within_a_call() -> None:
    begun = "assistant" + CALL[:-4]
    assert parse(CALL[-4:], begun=begun) == (None, None, [("f", '{"a": 1}')])


@example(text=f"{ANALYSIS}a{NEXT}{CALL}<|call|>", places=[40, 60], finish_with_last=True)
@settings(deadline=None)
@given(text=texts, places=st.lists(st.integers(0, 400), max_size=8), finish_with_last=st.booleans())
def test_any_split_gives_the_same_message(text: str, places: list[int], finish_with_last: bool) -> None:
    whole = parse(text)
    assert without_ids(stream(parser(), cut(text, places), finish_with_last)) == whole  # type: ignore[arg-type]
    assert without_ids(stream(parser(), list(text) or [""], finish_with_last)) == whole  # type: ignore[arg-type]
    assert all(arguments in text and arguments[0] == "{" for _, arguments in whole[2])


def by_hand(text: str) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    """The same rules, for a complete text of well-formed messages, with a regular expression."""
    said: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls = []
    for header, body in re.findall(
        r"([^|]*(?:<\|(?:channel|constrain)\|>[^|]*)*)<\|message\|>(.*?)(?:<\|end\|>|\Z)", text, re.S
    ):
        function = re.search(r"to=functions\.(\w+)", header)
        if function:
            calls.append((function[1], json.loads(body)))
        elif body:
            said["reasoning" if "analysis" in header else "content"].append(body)
    reasoning, content = ("\n".join(parts) for parts in said.values())
    return reasoning or None, content or (None if calls else ""), calls


prose = st.text(st.sampled_from("ab <>|{}é🦊\n"), max_size=12).filter(lambda text: "<|" not in text)
arguments = st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3), max_size=2)
said = st.tuples(st.sampled_from([ANALYSIS, FINAL, "<|channel|>commentary<|message|>"]), prose).map("".join)
called = st.tuples(st.sampled_from(["f", "g"]), arguments.map(json.dumps)).map(
    lambda call: f"<|channel|>commentary to=functions.{call[0]} json<|message|>{call[1]}"
)


@settings(deadline=None)
@given(st.lists(said | called, max_size=5))
def test_agrees_with_a_plain_reading(messages: list[str]) -> None:
    text = NEXT.join(messages)
    reasoning, content, calls = parse(text)
    assert (reasoning, content, [(name, json.loads(one)) for name, one in calls]) == by_hand(text)


@settings(deadline=None)
@given(
    reasoning=prose,
    content=prose,
    calls=st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments), max_size=2),
)
def test_what_a_template_renders_is_parsed_back(reasoning: str, content: str, calls: list[tuple[str, Any]]) -> None:
    written = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    message = {"role": "assistant", "thinking": reasoning, "content": content, "tool_calls": written}
    prompt = TEMPLATE.render(messages=[QUESTION], tools=TOOLS, add_generation_prompt=True)
    whole = TEMPLATE.render(messages=[QUESTION, message], tools=TOOLS, add_generation_prompt=False)
    text = whole.removeprefix(prompt) if whole != prompt.removesuffix("<|start|>assistant") else ""
    parsed: ParsedMessage = parser(open_message(prompt)).parse(text)
    assert (parsed.reasoning or "", parsed.content or "") == (reasoning, content)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls


def test_reasoning_tokens() -> None:
    channel, message, analysis, end, start = range(5)
    counter = AnalysisTokenCounter(channel, message, analysis, frozenset([end, start]))
    first = [channel, analysis, message, 10, 11, analysis, end]
    assert counter.feed(first) == 3
    assert [counter.feed([one]) for one in (start, 9, channel, 8, message, 10, end)] == [0] * 7
    assert counter.feed([start, channel, analysis]) + counter.feed([message, 10]) == 1
