"""`tool_choice: "auto"` without a configured parser: by the chat template, by the vocabulary, or as a JSON object."""

import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from nanovllm.server.conversation import tool_parser
from nanovllm.server.settings import ServerSettings
from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER
from tests.server.conftest import open_client
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Add."}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
ANTHROPIC_TOOLS = [{"name": "add", "input_schema": PARAMETERS}]
CALL = '{"name": "add", "arguments": {"a": 2}}'


@pytest.fixture
def engine(plain_tokenizer: Tokenizer) -> FakeEngine:
    """A model without tags of tool calls, such as the default model."""
    engine = FakeEngine()
    engine.tokenizer = plain_tokenizer
    return engine


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}], ids=str)
async def test_calls_are_json_objects(fields: dict[str, Any], engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = CALL
    choice = await chat(client, **fields)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2})
    engine.says = "There is nothing to add."
    choice = await chat(client, **fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == (engine.says, "stop")
    assert not choice["message"].get("tool_calls")


async def test_streamed(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = CALL
    body = {"messages": HELLO, "tools": TOOLS, "stream": True}
    text = (await client.post("/v1/chat/completions", json=body)).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
    assert parts[0] == {"name": "add", "arguments": ""} and all(set(part) == {"arguments"} for part in parts[1:])
    assert json.loads("".join(part["arguments"] for part in parts)) == {"a": 2}
    assert len(parts) > 3, "the arguments come in pieces"
    assert not any(delta.get("content") for delta in deltas)


async def test_cut_arguments(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = '{"name": "add", "arguments": {"a": 2, "b": 3, "c": "a long text that does not fit"}}'
    assert engine.tokenizer is not None
    limit = len(engine.tokenizer.encode(engine.says.partition(" that")[0]))
    choice = await chat(client, max_tokens=limit)
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert call["function"]["arguments"] == '{"a": 2, "b": 3, "c": "a long text'
    body = {"messages": HELLO, "max_tokens": limit, "tools": ANTHROPIC_TOOLS}
    answer = (await client.post("/v1/messages", json=body)).json()
    assert (answer["stop_reason"], answer["content"][0]["input"]) == ("max_tokens", {"a": 2, "b": 3})


SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
FORMATS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
]


@pytest.mark.parametrize("fields", FORMATS, ids=str)
async def test_with_a_format_of_the_content(
    fields: dict[str, Any], engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    """The grammar allows a call or the content; which it is follows from the text."""
    engine.says = CALL
    choice = await chat(client, **fields)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    engine.says = '{"answer": "<tool_call>"}'
    choice = await chat(client, **fields)
    assert (choice["message"]["content"], choice["message"].get("tool_calls")) == (engine.says, None)
    allowed = engine.seen[-1][1].structured_outputs
    assert allowed is not None
    content, call = json.loads(str(allowed.json))["anyOf"]
    assert content in (SCHEMA, {"type": "object"}) and call["properties"]["name"] == {"const": "add"}
    await chat(client, tool_choice="none", **fields)
    alone = engine.seen[-1][1].structured_outputs
    assert alone is not None and (alone.json_object or json.loads(str(alone.json)) == SCHEMA)


async def test_with_a_format_of_the_content_and_a_token_for_calls() -> None:
    """The grammar has calls in the model's own format. What it allows is tested with the compiler."""
    engine = FakeEngine(f"<tool_call>\n{CALL}\n</tool_call>")
    assert engine.tokenizer is not None
    opener = engine.tokenizer.backend.token_to_id("<tool_call>")
    async with open_client(engine) as client:
        choice = await chat(client, **FORMATS[0])
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        engine.says = '{"answer": "<tool_call>"}'
        choice = await chat(client, **FORMATS[0])
        assert (choice["message"]["content"], choice["message"].get("tool_calls")) == (engine.says, None)
    allowed = engine.seen[-1][1].structured_outputs
    assert allowed is not None and f"<[{opener}]>" in str(allowed.grammar)


@pytest.mark.parametrize("kind", [{"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}], ids=str)
async def test_other_grammars_leave_no_room_for_calls(kind: dict[str, Any], client: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "structured_outputs": kind}
    refused = await client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert next(iter(kind)) in refused.json()["error"]["message"]
    assert (await client.post("/v1/chat/completions", json={**body, "tool_choice": "none"})).status_code == 200


async def test_the_other_apis(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = CALL
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    answer = (await client.post("/v1/responses", json={"input": "Add.", "tools": tools})).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    body = {"messages": HELLO, "max_tokens": 60, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "auto"}}
    answer = (await client.post("/v1/messages", json=body)).json()
    assert answer["stop_reason"] == "tool_use" and answer["content"][0]["input"] == {"a": 2}


async def test_count_tokens_with_tools(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    for fields in ({}, {"tool_choice": {"type": "auto"}}, {"tool_choice": {"type": "any"}}):
        body = {"messages": HELLO, "tools": ANTHROPIC_TOOLS, **fields}
        counted = await client.post("/v1/messages/count_tokens", json=body)
        assert counted.status_code == 200, counted.text
        sent = await client.post("/v1/messages", json={**body, "max_tokens": 5})
        assert sent.status_code == 200 and counted.json() == {"input_tokens": len(engine.seen[-1][0])}
    bad = {"messages": HELLO, "tools": [{"name": "not a name", "input_schema": PARAMETERS}]}
    assert (await client.post("/v1/messages/count_tokens", json=bad)).status_code == 400


@pytest.mark.parametrize(
    ("template", "vocabulary", "option", "expected"),
    [
        ("{{ messages }}", False, None, None),
        ("{{ messages }}", True, None, "hermes"),
        ("<tool_call>{{ tools }}", False, None, "hermes"),
        ({"default": "{{ messages }}", "tool_use": "<tool_call>"}, False, None, "hermes"),
        ("<|python_tag|>{{ tools }}", True, None, "llama3_json"),
        ("<tool_call>", True, "llama3_json", "llama3_json"),
        ("<tool_call>\n<function=f>\n<parameter=a>", True, None, "qwen3_coder"),
        ("<tool_call>{name}<arg_key>{key}</arg_key>", True, None, "glm45"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", True, None, "mistral"),
        ("<|tool_call>call:<tool_call|>", True, None, "gemma4"),
        ("<start_function_call>call:", True, None, "functiongemma"),
        ("<|tool_call_start|>[", True, None, "lfm2"),
        ("<start_of_turn>model\n", False, None, None),  # Gemma 3
        (None, False, None, None),
    ],
)
def test_the_parser_is_chosen(
    template: Any, vocabulary: bool, option: str | None, expected: str | None, plain_tokenizer: Tokenizer
) -> None:
    engine = FakeEngine()
    backend = Backend.from_file(str(TOKENIZER / "tokenizer.json")) if vocabulary else plain_tokenizer.backend
    engine.tokenizer = Tokenizer(backend, chat_template=template)
    assert tool_parser(ServerSettings(tool_call_parser=option), engine) == expected


async def test_the_option_still_decides(engine: FakeEngine) -> None:
    engine.says = f"<tool_call>{CALL}</tool_call>"
    async with open_client(engine, tool_call_parser="hermes") as client:
        assert (await chat(client))["finish_reason"] == "tool_calls"
    async with open_client(engine) as client:
        assert (await chat(client))["message"]["content"] == engine.says
