"""Templates in the families' formats: rendered as transformers renders them, and what they write is parsed back."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_parsing import parse_response

from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER
from tests.server.parsers.families import FAMILIES, GEMMA, GLM, LFM, QWEN, TOOLS, Family

USER = {"role": "user", "content": "What is 2 + 2? <b>"}
ARGUMENTS = {
    "s": "Köln & “Bonn”",
    "i": 2,
    "x": 0.5,
    "b": True,
    "l": [1, "a", None],
    "o": {"a": {"b": False}},
    "n": None,
}
CALLS = [{"type": "function", "function": {"name": name, "arguments": ARGUMENTS}} for name in ("f", "g_2")]
CHAT = [
    {"role": "system", "content": "Be brief. 请简短。"},
    USER,
    {"role": "assistant", "content": " I look.\n", "reasoning_content": "Hm.", "tool_calls": CALLS},
    {"role": "tool", "content": '{"sky": "grey"}', "name": "f"},
    {"role": "assistant", "content": "Grey."},
    USER,
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(str(TOKENIZER))


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rendering_equals_transformers(
    family: Family, tools: Any, add_generation_prompt: bool, options: dict[str, Any], theirs: Any
) -> None:
    small = Tokenizer.from_dir(TOKENIZER)
    ours = Tokenizer(small.backend, chat_template=family.source, special_tokens=small.special_tokens)
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **options}
    for chat in (CHAT, CHAT[:2], CHAT[1:3]):
        expected = theirs.apply_chat_template(chat, chat_template=family.source, tokenize=False, **options)
        assert ours.render_chat(chat, **options) == expected


prose = st.text(st.sampled_from("ab <>/{}[]|:=é🦊\n"), max_size=20).map(str.strip)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


def arguments(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of the declared types. transformers reads what is declared as a number as a float."""
    nested = st.recursive(
        scalars | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=4,
    )
    values = {
        "s": texts,
        "i": st.integers(),
        "x": st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "l": st.lists(nested, max_size=3),
        "o": st.dictionaries(st.sampled_from("abc"), nested, max_size=3),
        "n": st.none() | texts.filter(lambda text: text.strip() not in ("null", "None")),
    }
    return st.fixed_dictionaries({}, optional=values)


ANY_TEXT = st.text() | st.sampled_from(
    ["</tool_call>", '{"a": "\\', "</think>", "5", "true", "null", "\n a\n", "}", "["]
)
TEXTS = {
    QWEN: ANY_TEXT.filter(lambda text: "</parameter>" not in text),
    GLM: ANY_TEXT.filter(lambda text: "</arg_value>" not in text),
    GEMMA: ANY_TEXT.filter(lambda text: '<|"|>' not in text),
    LFM: st.text(st.characters(exclude_characters="'\\", exclude_categories=["C"])),  # its template escapes nothing
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(deadline=None, max_examples=50)
@given(data=st.data(), reasoning=prose, content=prose)
def test_what_a_template_writes_is_parsed_back(family: Family, data: Any, reasoning: str, content: str) -> None:
    call = st.tuples(st.sampled_from(["f", "g_2"]), arguments(TEXTS.get(family, ANY_TEXT)))
    calls = data.draw(st.lists(call, max_size=3))
    reasoning = reasoning if family.reasoning else ""
    parsed = family.parser().parse(family.write(reasoning, content, calls))
    assert (parsed.reasoning or "", parsed.content or "") == (reasoning, content)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls


# How transformers itself parses completions of these models. It strips values and has no format of GLM's.
RESPONSE_TEMPLATES = pytest.importorskip("transformers.cli.serving.utils")._RESPONSE_TEMPLATE_FALLBACKS
GLM_RESPONSE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>\w+)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def response_template(family: Family) -> Any:
    if family is GLM:
        return GLM_RESPONSE
    return next(each for types, each in RESPONSE_TEMPLATES.items() if family.name in types)


@pytest.mark.parametrize("family", [QWEN, GLM, GEMMA], ids=lambda family: family.name)
@settings(deadline=None, max_examples=50)
@given(data=st.data(), reasoning=prose, content=prose)
def test_agrees_with_transformers(family: Family, data: Any, reasoning: str, content: str) -> None:
    texts = st.text(st.sampled_from('ab 5é🦊\n{}[]":,'), max_size=8).map(str.strip)
    call = st.tuples(st.sampled_from(["f", "g_2"]), arguments(texts))
    text = family.write(reasoning, content, data.draw(st.lists(call, min_size=1, max_size=2)))
    expected = parse_response(text, response_template(family), prefix=family.prompt, tools=TOOLS)
    parsed = family.parser().parse(text)
    assert parsed.reasoning == expected.get("reasoning_content")
    assert (parsed.content or "") == expected.get("content", "")
    functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in parsed.tool_calls]
    assert functions == [call["function"] for call in expected["tool_calls"]]
