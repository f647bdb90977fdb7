"""A whole message of each family, with reasoning, text and two calls, cut at every place and ended at every place."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm.server.parsers import ChatParser, HarmonyParser, ParsedMessage, collect, open_message
from tests.server.parsers.families import FAMILIES, QUESTION, TOOLS
from tests.server.parsers.test_harmony import TEMPLATE
from tests.server.parsers.test_splits import without_ids

REASONING, CONTENT = "Hm: is 1 < 2? [é🦊]", "I look {there}. 你好"
ARGUMENTS = {"s": 'a "b" é🦊 {c}', "i": -2, "l": [1, ["x", {"y": None}]], "o": {"a": {"b": [True, 0.5]}}}
CALLS: list[tuple[str, Any]] = [("f", ARGUMENTS), ("g_2", {})]
Parser = ChatParser | HarmonyParser


def harmony() -> tuple[Callable[[], Parser], str]:
    """Of several calls, the template writes the first."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]
    message = {"role": "assistant", "thinking": REASONING, "content": CONTENT, "tool_calls": calls}
    prompt = TEMPLATE.render(messages=[QUESTION], tools=TOOLS, add_generation_prompt=True)
    text = TEMPLATE.render(messages=[QUESTION, message], tools=TOOLS, add_generation_prompt=False)
    second = "<|start|>assistant<|channel|>commentary to=functions.g_2 <|constrain|>json<|message|>{}<|call|>"
    return lambda: HarmonyParser(("f", "g_2"), begun=open_message(prompt)), text.removeprefix(prompt) + second


MADE: dict[str, tuple[Callable[[], Parser], str]] = {"harmony": harmony()}
for each in FAMILIES:
    MADE[each.name] = each.parser, each.write(REASONING if each.reasoning else "", CONTENT, CALLS)


def parts(message: ParsedMessage) -> list[str]:
    """Reasoning, content, and name and arguments of each call."""
    calls = [part for call in message.tool_calls for part in (call.name, call.arguments)]
    return [message.reasoning or "", message.content or "", *calls]


@pytest.fixture(params=MADE)
def made(request: pytest.FixtureRequest) -> tuple[Callable[[], Parser], str]:
    return MADE[request.param]


def test_the_message(made: tuple[Callable[[], Parser], str], request: pytest.FixtureRequest) -> None:
    parser, text = made
    message = parser().parse(text)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == CALLS
    assert (message.reasoning or "", message.content) == ("" if "lfm2" in request.node.name else REASONING, CONTENT)


def test_cut_in_two_at_every_place(made: tuple[Callable[[], Parser], str]) -> None:
    parser, text = made
    whole = without_ids(parser().parse(text))
    for place in range(len(text) + 1):
        cut = parser()
        events = cut.feed(text[:place]) + cut.feed(text[place:], finished=True)
        assert without_ids(collect(events)) == whole, text[:place]


def test_nothing_is_taken_back(made: tuple[Callable[[], Parser], str]) -> None:
    """What was sent after any number of characters is the beginning of what the whole message says."""
    parser, text = made
    final = parts(parser().parse(text))
    streamed, events = parser(), []
    for place, char in enumerate(text):
        events += streamed.feed(char)
        for sent, said in zip(parts(collect(events)), final, strict=False):
            assert said.startswith(sent), text[: place + 1]


def test_ended_at_every_place(made: tuple[Callable[[], Parser], str]) -> None:
    """At max_tokens, a call whose name is complete stays a call; no text is made up."""
    parser, text = made
    final = parts(parser().parse(text))
    num_calls = 0
    for place in range(len(text)):
        message = parser().parse(text[:place])
        assert len(message.tool_calls) >= num_calls
        num_calls = len(message.tool_calls)
        for number, call in enumerate(message.tool_calls):
            name, arguments = final[2 + 2 * number : 4 + 2 * number]
            # harmony's markers are single tokens: only a test can cut one, which is then text
            complete = call.arguments.startswith(arguments) and parser is MADE["harmony"][0]
            assert call.name == name and (arguments.startswith(call.arguments) or complete)
        for said, known in zip((message.reasoning or "", message.content or ""), final, strict=False):
            # after what is known there may be the beginning of a marker or of a call
            assert known.startswith(said) or said.startswith(known) or text.startswith(said)
