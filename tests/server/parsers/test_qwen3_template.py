"""An assistant message rendered by Qwen3's chat template is parsed back to the same message."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.server.parsers import make_parser
from nanovllm.text.chat_template import ChatTemplates

TEMPLATE = ChatTemplates({"default": (Path(__file__).parent / "data" / "qwen3.jinja").read_text().rstrip("\n")})
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g-2")]
QUESTION = {"role": "user", "content": "Well?"}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["</tool_call>", '{"a": "\\', "</think>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.tuples(st.sampled_from(["f", "g-2"]), st.dictionaries(st.text(max_size=4), values, max_size=3))
prose = st.text(st.sampled_from("ab <>/{}é🦊\n"), max_size=20).map(str.strip)


def render(**options: Any) -> str:
    return TEMPLATE.render(tools=TOOLS, **options)


def written_by_assistant(message: dict[str, Any]) -> str:
    prompt = render(messages=[QUESTION], add_generation_prompt=True)
    whole = render(messages=[QUESTION, message], add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt).removesuffix("<|im_end|>\n")


@pytest.mark.parametrize("as_text", [False, True])
@settings(deadline=None)
@given(reasoning=prose, content=prose, calls=st.lists(calls, max_size=3))
def test_round_trip(as_text: bool, reasoning: str, content: str, calls: list[tuple[str, Any]]) -> None:
    tool_calls = [
        {"type": "function", "function": {"name": name, "arguments": json.dumps(value) if as_text else value}}
        for name, value in calls
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}
    parser = make_parser(reasoning="qwen3", tools="hermes", tool_schemas=TOOLS, tool_choice="auto")
    parsed = parser.parse(written_by_assistant(message))
    assert (parsed.reasoning or "", parsed.content or "") == (reasoning, content)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls


def test_completion_after_a_prompt_without_reasoning() -> None:
    prompt = render(messages=[QUESTION], add_generation_prompt=True, enable_thinking=False)
    assert prompt.endswith("</think>\n\n")
    parser = make_parser(reasoning="qwen3", tools="hermes", tool_schemas=TOOLS, tool_choice="auto")
    assert parser.parse("Well.").content == "Well."
