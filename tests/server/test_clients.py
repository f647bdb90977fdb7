"""Third-party clients: OpenAI's for Node, and LangChain's."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine
from tests.server.test_chat import CALLING, TOOLS

Serve = Callable[..., LiveServer]
NODE = Path(__file__).parent / "node"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine("Good day to you.")


@pytest.fixture
def server(serve: Serve, engine: FakeEngine) -> LiveServer:
    return serve(engine, api_key=("secret",))


# --- Node -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(server: LiveServer) -> Callable[[str], Any]:
    """Run one of the calls of client.mjs and return what it printed."""
    if shutil.which("node") is None or not (NODE / "node_modules" / "openai").exists():
        pytest.skip("needs Node with the packages of tests/server/node: run `npm ci` there")

    def call(name: str) -> Any:
        command = ["node", str(NODE / "client.mjs"), f"{server.url}/v1", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


def test_node_chat(node: Callable[[str], Any]) -> None:
    assert node("models") == ["fake"]
    told = node("chat")
    answer = told["answer"]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Good day to you."] * 2
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert answer["usage"]["completion_tokens"] > 0 and told["requestId"]


def test_node_stream(node: Callable[[str], Any]) -> None:
    *chunks, last = node("stream")
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Good day to you."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and last["usage"]["total_tokens"] > 0


def test_node_tools(node: Callable[[str], Any], engine: FakeEngine) -> None:
    engine.says = CALLING
    for answer in node("tools").values():
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2})
        assert choice["finish_reason"] == "tool_calls"


def test_node_json_schema(node: Callable[[str], Any], engine: FakeEngine) -> None:
    engine.says = '{"a": 1}'
    answer = node("schema")
    assert answer["choices"][0]["message"]["parsed"] == {"a": 1}
    assert json.loads(engine.seen[0][1].structured_outputs.json)["properties"] == {"a": {"type": "integer"}}


def test_node_embeddings(node: Callable[[str], Any]) -> None:
    packed, plain = node("embeddings")
    assert len(packed) == 2
    for one, other in zip(packed, plain, strict=True):
        assert one == pytest.approx(other) and one[:2] == pytest.approx([0.6, 0.8])


def test_node_responses(node: Callable[[str], Any]) -> None:
    told = node("responses")
    assert told["text"] == "Good day to you."
    assert told["events"][0] == "response.created" and told["events"][-1] == "response.completed"


def test_node_errors(node: Callable[[str], Any], engine: FakeEngine) -> None:
    assert node("errors") == [
        {"kind": "BadRequestError", "status": 400, "param": "temperature", "code": None},
        {"kind": "NotFoundError", "status": 404, "param": "model", "code": "model_not_found"},
        {"kind": "AuthenticationError", "status": 401, "param": None, "code": "invalid_api_key"},
    ]
    engine.fails_after = 2
    told = node("brokenStream")
    assert told["kind"] == "APIError" and "engine has stopped" in told["message"]


def test_node_abort(node: Callable[[str], Any], engine: FakeEngine, server: LiveServer) -> None:
    engine.gate, engine.holds_after = asyncio.Event(), 3
    assert node("abort") >= 2  # the chunks that had arrived are still read; without the abort it would wait forever
    server.wait_until(lambda: len(engine.aborted) == 1 and not engine.open)


# --- LangChain --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(server: LiveServer) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="secret", model="fake", max_retries=0, timeout=20)


def test_langchain_answers_and_streams(model: Any) -> None:
    answer = model.invoke([("system", "Be kind."), ("human", "Hello")])
    assert answer.content == "Good day to you." and answer.response_metadata["finish_reason"] == "stop"
    chunks = list(model.stream("Hello", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == "Good day to you."
    (usage,) = (chunk.usage_metadata for chunk in chunks if chunk.usage_metadata)
    assert usage["output_tokens"] == answer.usage_metadata["output_tokens"] > 0


def test_langchain_calls_tools_and_sends_their_results(model: Any, engine: FakeEngine) -> None:
    engine.says = CALLING
    able = model.bind_tools(TOOLS)
    asked = able.invoke("Add.")
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2})
    engine.says = "It is 2."
    past = [("human", "Add."), asked, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
    assert able.invoke(past).content == "It is 2."
    assert "tool\n2<|im_end|>" in engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)


def test_langchain_reads_structured_output(model: Any, engine: FakeEngine) -> None:
    engine.says = '{"a": 1}'
    schema = {"title": "sum", "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert model.with_structured_output(schema, method="json_schema").invoke("Add.") == {"a": 1}
    assert engine.seen[0][1].structured_outputs is not None
