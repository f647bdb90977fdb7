"""The formats of model families in the server: how the parsers are chosen, and that special tags reach them."""

import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from nanovllm.server.conversation import reasoning_parser, tool_parser
from nanovllm.server.settings import ServerSettings
from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER
from tests.server.fake_engine import FakeEngine
from tests.server.parsers.families import FAMILIES, LFM, TOOLS, Family

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Well?"}]
ARGUMENTS = {"s": "a b", "i": 2, "l": [1, "c"]}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def engine(family: Family) -> FakeEngine:
    """It thinks, says something and calls a tool."""
    backend = Backend.from_file(str(TOKENIZER / "tokenizer.json"))
    backend.add_special_tokens(list(family.special))
    reasoning = "Hm, well." if family.reasoning else ""
    engine = FakeEngine(family.write(reasoning, "I look.", [("f", ARGUMENTS)]), max_model_len=4096)
    engine.tokenizer = Tokenizer(backend, chat_template=family.source)
    return engine


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 300, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def test_the_parsers_are_chosen(family: Family, engine: FakeEngine) -> None:
    assert tool_parser(ServerSettings(), engine) == family.tools
    chosen = reasoning_parser(ServerSettings(), engine)
    assert chosen == (family.reasoning if family.special and family is not LFM else "qwen3")  # by </think>


async def test_message(family: Family, engine: FakeEngine, client: httpx.AsyncClient) -> None:
    answer = (await chat(client)).json()
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", ARGUMENTS)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    if family.reasoning:
        assert choice["message"]["reasoning_content"] == "Hm, well."
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert engine.seen[-1][1].skip_special_tokens is not bool(family.special)


async def test_streamed(family: Family, client: httpx.AsyncClient) -> None:
    text = (await chat(client, stream=True)).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (
        "Hm, well." if family.reasoning else ""
    )
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
    assert parts[0]["name"] == "f" and json.loads("".join(part["arguments"] for part in parts)) == ARGUMENTS


async def test_a_forced_call_is_a_json_object(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = '{"name": "f", "arguments": {"i": 2}}'
    (choice,) = (await chat(client, tool_choice="required")).json()["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"i": 2}
    assert engine.seen[-1][1].skip_special_tokens


async def test_the_messages_api(family: Family, engine: FakeEngine, client: httpx.AsyncClient) -> None:
    tools = [{"name": "f", "input_schema": TOOLS[0]["function"]["parameters"]}]
    answer = (await client.post("/v1/messages", json={"messages": HELLO, "tools": tools, "max_tokens": 300})).json()
    assert answer["stop_reason"] == "tool_use" and answer["content"][-1]["input"] == ARGUMENTS
    assert [block["type"] for block in answer["content"]][-2:] == ["text", "tool_use"]


async def test_what_a_grammar_forces_has_no_reasoning(
    family: Family, engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    """Reasoning that the template opens is closed, and nothing is parsed."""
    engine.says = '{"a": 2}'
    for fields in ({"tools": None, "response_format": {"type": "json_object"}}, {"tool_choice": "required"}):
        (choice,) = (await chat(client, **fields)).json()["choices"]
        assert choice["message"]["content"] == engine.says and "reasoning_content" not in choice["message"]
        token_ids, params, _ = engine.seen[-1]
        assert engine.tokenizer is not None and params.skip_special_tokens
        prompt = engine.tokenizer.decode(token_ids, skip_special_tokens=False)
        ends = {"qwen3_5": "<|im_start|>assistant\n<think>\n\n</think>\n\n", "glm": "<|assistant|><think></think>"}
        assert prompt.endswith(ends.get(family.name, family.prompt[-10:]))
