"""Reasoning is separated from content in all the forms in which models generate it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.errors import ConfigError
from nanovllm.server.parsers import (
    ChatParser,
    ContentDelta,
    ReasoningDelta,
    end_of_reasoning,
    make_parser,
    opens_reasoning,
)
from nanovllm.server.parsers.reasoning import REASONING_FORMATS
from tests.server.parsers.test_splits import cut, stream, without_ids


def parser(reasoning: str | None, inside: bool = False) -> ChatParser:
    return make_parser(
        reasoning=reasoning, tools=None, tool_schemas=(), tool_choice=None, prompt_opens_reasoning=inside
    )


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nWhy?\n\nSo.\n</think>\n\nBecause.\n", "Why?\n\nSo.", "Because.\n"),
        ("<think>a</think>b", "a", "b"),
        ("\n<think>a</think>\n    indented", "a", "    indented"),
        ("<think>\n\n</think>\n\nNo thought.", None, "No thought."),
        ("<think>\nnever closed\n", "never closed\n", ""),
        ("<think>\ncut in the tag</thi", "cut in the tag</thi", ""),
        ("<think>a", "a", ""),
        ("<think>", None, ""),
        ("No thinking.\n", None, "No thinking.\n"),
        ("  \n", None, "  \n"),
        ("", None, ""),
        ("<thi", None, "<thi"),
        ("<thinker>", None, "<thinker>"),
        ("A <think>b</think> c", None, "A <think>b</think> c"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("<think>1 < 2 </ 3 </think ></think>x", "1 < 2 </ 3 </think >", "x"),
    ],
)
def test_qwen3(text: str, reasoning: str | None, content: str) -> None:
    message = parser("qwen3").parse(text)
    assert (message.reasoning, message.content, message.tool_calls) == (reasoning, content, ())


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nFirst.\n</think>\n\nThen.", "First.", "Then."),
        ("<think>\nFirst.\n</think>\n\nThen.", "First.", "Then."),
        ("still thinking", "still thinking", ""),
        ("</think>Then.", None, "Then."),
        ("<thi", "<thi", ""),
    ],
)
@pytest.mark.parametrize(("name", "inside"), [("deepseek_r1", False), ("qwen3", True)])
def test_completions_that_begin_inside_the_reasoning(
    name: str, inside: bool, text: str, reasoning: str | None, content: str
) -> None:
    message = parser(name, inside).parse(text)
    assert (message.reasoning, message.content) == (reasoning, content)


THOUGHT = "<|channel>thought"


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("glm45", "\n<think>a</think>\nb", "a", "b"),
        ("glm47", "<think></think>b", None, "b"),
        ("mistral", "[THINK]a[/THINK]b", "a", "b"),
        ("mistral", "[THINK]a [/THIN", "a [/THIN", ""),
        ("mistral", "<think>a</think>b", None, "<think>a</think>b"),
        ("gemma4", f"{THOUGHT}\na\n<channel|>b", "a", "b"),
        ("gemma4", f"{THOUGHT}\n<channel|>b", None, "b"),
        ("gemma4", "<|channel>final\nb", None, "<|channel>final\nb"),
    ],
)
def test_other_formats(name: str, text: str, reasoning: str | None, content: str) -> None:
    message = parser(name).parse(text)
    assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize("name", ["mistral", "gemma4"])
@settings(deadline=None)
@given(data=st.data(), places=st.lists(st.integers(0, 100), max_size=8), inside=st.booleans(), last=st.booleans())
def test_any_split_gives_the_same_message(name: str, data: Any, places: list[int], inside: bool, last: bool) -> None:
    format = REASONING_FORMATS[name]
    pieces = [format.open, format.close, format.open[:-1], format.close[:-1], format.close[1:], "\n", " ", "a", "é🦊"]
    text = data.draw(st.lists(st.sampled_from(pieces), max_size=8).map("".join))
    whole = without_ids(parser(name, inside).parse(text))
    assert without_ids(stream(parser(name, inside), cut(text, places), last)) == whole
    assert without_ids(stream(parser(name, inside), list(text) or [""], last)) == whole


def test_without_a_reasoning_parser_tags_are_text() -> None:
    assert parser(None).parse("<think>a</think>b").content == "<think>a</think>b"


def test_text_is_returned_as_soon_as_it_is_certain() -> None:
    streamed = parser("qwen3")
    pieces = ["<th", "ink>", "\nI ", "see", "\n", "</", "thin", "k>", "\n\n", "Yes", "\n", "no"]
    assert [streamed.feed(piece) for piece in pieces] == [
        [],
        [],
        [ReasoningDelta("I ")],
        [ReasoningDelta("see")],
        [],
        [],
        [],
        [],
        [],
        [ContentDelta("Yes")],
        [ContentDelta("\n")],
        [ContentDelta("no")],
    ]
    assert streamed.feed("", finished=True) == []


def test_a_partial_tag_is_returned_once_it_is_known_to_be_text() -> None:
    streamed = parser("deepseek_r1")
    assert streamed.feed("a\n</") == [ReasoningDelta("a")]
    assert streamed.feed("b") == [ReasoningDelta("\n</b")]


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|assistant|><think>", True),
        ("<|turn>model\n<|channel>thought\n", True),
        ("[INST]Well?[/INST][THINK]", True),
    ],
)
def test_prompt_that_opens_the_reasoning(prompt: str, inside: bool) -> None:
    assert opens_reasoning(prompt) is inside
    assert not opens_reasoning(prompt + end_of_reasoning(prompt)) and bool(end_of_reasoning(prompt)) is inside


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'r1'.*deepseek_r1, gemma4, glm45, glm47, harmony, mistral, qwen3"):
        parser("r1")
