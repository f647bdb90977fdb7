"""gpt-oss' format in the server: its tags are special tokens, and its channels become the fields of the APIs."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from nanovllm.server.parsers.harmony import TAGS
from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

TEMPLATE = (Path(__file__).parent / "parsers" / "data" / "harmony.jinja").read_text()
HELLO = [{"role": "user", "content": "Add."}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
THINKS = "<|channel|>analysis<|message|>Hm, well.<|end|><|start|>assistant"
SAYS = f"{THINKS}<|channel|>final<|message|>Two."
CALLS = f'{THINKS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 2}}'


@pytest.fixture
def engine() -> FakeEngine:
    backend = Backend.from_file(str(TOKENIZER / "tokenizer.json"))
    backend.add_special_tokens(list(TAGS))
    backend.add_tokens(["analysis"])
    engine = FakeEngine(SAYS)
    engine.tokenizer = Tokenizer(backend, chat_template=TEMPLATE)
    return engine


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(engine: FakeEngine) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)


async def test_channels(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    answer = await chat(client)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == ("Hm, well.", "Two.", "stop")
    assert engine.tokenizer is not None
    num_tokens = len(engine.tokenizer.encode("Hm, well.", add_special_tokens=False))
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens
    message = (await chat(client, include_reasoning=False))["choices"][0]["message"]
    assert message["content"] == "Two." and not message.get("reasoning_content")


async def test_calls(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = CALLS
    (choice,) = (await chat(client, tools=TOOLS))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2})
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"


async def test_streamed(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    for engine.says, content, num_calls in ((SAYS, "Two.", 0), (CALLS, "", 1)):
        body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 200, "stream": True}
        text = (await client.post("/v1/chat/completions", json=body)).text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm, well."
        assert "".join(delta.get("content") or "" for delta in deltas) == content
        assert sum(len(delta.get("tool_calls") or []) > 0 for delta in deltas) >= num_calls
        assert "<|" not in text


async def test_the_other_apis(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/responses", json={"input": "Add.", "max_output_tokens": 200})).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    answer = (await client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 200})).json()
    assert answer["content"][-1]["text"] == "Two."


async def test_what_a_grammar_forces_is_content(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    """The header that the grammar leaves no room for is a part of the prompt."""
    engine.says = '{"a": 2}'
    (choice,) = (await chat(client, response_format={"type": "json_object"}))["choices"]
    assert choice["message"]["content"] == engine.says
    assert prompt_of(engine).endswith("<|start|>assistant<|channel|>final<|message|>")
    assert engine.seen[-1][1].skip_special_tokens
    await chat(client)
    assert prompt_of(engine).endswith("<|start|>assistant") and not engine.seen[-1][1].skip_special_tokens


async def test_earlier_reasoning_is_in_the_prompt(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = {"role": "assistant", "reasoning_content": "Hm, well.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"}
    await chat(client, messages=[*HELLO, said, result], tools=TOOLS, reasoning_effort="high")
    assert "<|channel|>analysis<|message|>Hm, well.<|end|>" in prompt_of(engine)
    assert "Reasoning: high" in prompt_of(engine)
    await chat(client, messages=[*HELLO, {**said, "content": "I add."}, result], tools=TOOLS)
    assert "analysis<|message|>" not in prompt_of(engine)
