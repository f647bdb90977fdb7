"""The openai and anthropic clients, which check every response against their own types."""

import json
from collections.abc import Callable, Iterator

import openai
import pytest
from anthropic import Anthropic
from anthropic import BadRequestError as AnthropicBadRequest
from openai import OpenAI

from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine
from tests.server.test_chat import CALLING, TOOLS

HELLO = [{"role": "user", "content": "Hello"}]
Serve = Callable[..., LiveServer]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine("Good day to you.")


@pytest.fixture
def server(serve: Serve, engine: FakeEngine) -> LiveServer:
    return serve(engine, api_key=("secret",))


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20, _strict_response_validation=True
    ) as opened:
        yield opened


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, n=2, logprobs=True, top_logprobs=3, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["Good day to you."] * 2
    assert answer.choices[0].finish_reason == "stop" and len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 0 and answer._request_id


def test_chat_stream(client: OpenAI) -> None:
    options = {"include_usage": True}
    with client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options=options, logprobs=True
    ) as stream:
        *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Good day to you."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == [] and last.usage.completion_tokens > 0


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Good day to you."] * 2
    # The client's type of a chunk does not allow a null finish_reason, which OpenAI's own server sends.
    lenient = OpenAI(base_url=client.base_url, api_key="secret", max_retries=0, timeout=20)
    with lenient, lenient.completions.create(model="fake", prompt=[5, 6], stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "Good day to you."


def test_tools(client: OpenAI, engine: FakeEngine) -> None:
    engine.says = CALLING
    message = client.chat.completions.create(model="fake", messages=HELLO, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
    with client.chat.completions.stream(model="fake", messages=HELLO, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"a": 2}
    assert final.finish_reason == "tool_calls"


def test_json_schema(client: OpenAI, engine: FakeEngine) -> None:
    engine.says = '{"a": 1}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chosen = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="fake", messages=HELLO, response_format=chosen)
    assert json.loads(answer.choices[0].message.content) == {"a": 1}
    assert json.loads(engine.seen[0][1].structured_outputs.json) == schema


def test_embeddings(client: OpenAI) -> None:
    answer = client.embeddings.create(model="fake", input="Hello", encoding_format="float")
    assert answer.data[0].embedding[:2] == [0.6, 0.8]
    # By default the client requests base64 and decodes it, but has no type for the result.
    with OpenAI(base_url=client.base_url, api_key="secret", max_retries=0, timeout=20) as lenient:
        answer = lenient.embeddings.create(model="fake", input="Hello")
    assert answer.data[0].embedding[:2] == pytest.approx([0.6, 0.8])


def test_errors(client: OpenAI, engine: FakeEngine, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    engine.fails_after = 2
    stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="engine has stopped"):
        list(stream)


# --- the Responses API ------------------------------------------------------------------------------------------------


def test_responses(client: OpenAI, engine: FakeEngine) -> None:
    answer = client.responses.create(model="fake", input="Hello", instructions="Be kind.", max_output_tokens=100)
    assert answer.output_text == "Good day to you." and answer.status == "completed"
    text = engine.tokenizer.decode(engine.seen[0][0], skip_special_tokens=False)
    assert "system\nBe kind." in text and "user\nHello" in text
    cut = client.responses.create(model="fake", input="Hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_responses_stream(client: OpenAI, engine: FakeEngine) -> None:
    engine.says = "<think>\nHm.\n</think>\n\nYes, sir."
    with client.responses.create(model="fake", input="Hello", stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Yes, sir."
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


def test_responses_with_tools_and_their_results(client: OpenAI, engine: FakeEngine) -> None:
    engine.says = CALLING
    tools = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    answer = client.responses.create(model="fake", input="Add.", tools=tools)
    call = next(item for item in answer.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"a": 2}
    with client.responses.create(model="fake", input="Add.", tools=tools, stream=True) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert json.loads(done[0].arguments) == {"a": 2}
    engine.says = "It is 2."
    past = [{"role": "user", "content": "Add."}, *[item.to_dict() for item in answer.output]]
    past.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
    assert client.responses.create(model="fake", input=past, tools=tools).output_text == "It is 2."
    text = engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)
    assert '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' in text and "tool\n2<|im_end|>" in text


def test_responses_refuse_what_needs_state(client: OpenAI) -> None:
    for fields in ({"previous_response_id": "resp_1"}, {"store": True}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
            client.responses.create(model="fake", input="Hello", **fields)


# --- the Messages API -------------------------------------------------------------------------------------------------


@pytest.fixture
def anthropic(server: LiveServer) -> Iterator[Anthropic]:
    with Anthropic(
        base_url=server.url, api_key="secret", max_retries=0, timeout=20, _strict_response_validation=True
    ) as opened:
        yield opened


def test_messages(anthropic: Anthropic, engine: FakeEngine) -> None:
    engine.cached = 2
    answer = anthropic.messages.create(model="fake", max_tokens=100, system="Be kind.", messages=HELLO)
    assert [block.text for block in answer.content] == ["Good day to you."] and answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens + 2 == len(engine.seen[0][0]) and answer.usage.cache_read_input_tokens == 2
    cut = anthropic.messages.create(
        model="fake", max_tokens=1, messages=HELLO, stop_sequences=["x"], extra_body={"top_k": 3}
    )
    assert cut.stop_reason == "max_tokens"
    assert (engine.seen[1][1].top_k, engine.seen[1][1].stop) == (3, ("x",))
    count = anthropic.messages.count_tokens(model="fake", system="Be kind.", messages=HELLO)
    assert count.input_tokens == len(engine.seen[0][0])


def test_messages_stream(anthropic: Anthropic, engine: FakeEngine) -> None:
    engine.says = CALLING
    tools = [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}]
    with anthropic.messages.stream(model="fake", max_tokens=200, messages=HELLO, tools=tools) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"message_start", "content_block_start", "content_block_stop", "message_stop"} <= kinds
    assert [block.type for block in final.content] == ["thinking", "tool_use"]
    assert final.content[0].thinking == "Hm." and final.content[1].input == {"a": 2}
    assert final.stop_reason == "tool_use" and final.usage.output_tokens > 0


def test_messages_with_past_calls(anthropic: Anthropic, engine: FakeEngine) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
    ]
    anthropic.messages.create(model="fake", max_tokens=100, messages=messages)
    text = engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)
    assert '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' in text and "tool\n2<|im_end|>" in text


def test_messages_with_thinking(anthropic: Anthropic, engine: FakeEngine) -> None:
    engine.says = "<think>\nHm.\n</think>\n\nYes."
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        with anthropic.messages.stream(model="fake", max_tokens=2000, messages=HELLO, thinking=thinking) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"] and final.content[0].thinking == "Hm."
    assert [params.thinking_token_budget for _, params, _ in engine.seen] == [1024, None]
    final = anthropic.messages.create(model="fake", max_tokens=2000, messages=HELLO, thinking={"type": "disabled"})
    text = engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)
    assert text.endswith("<think>\n\n</think>\n\n")


def test_efforts(client: OpenAI, engine: FakeEngine) -> None:
    for effort in ("none", "low", "medium", "high"):
        client.chat.completions.create(model="fake", messages=HELLO, reasoning_effort=effort)
        answer = client.responses.create(model="fake", input="Hello", reasoning={"effort": effort})
        assert answer.reasoning.effort == effort
        texts = [engine.tokenizer.decode(tokens, skip_special_tokens=False) for tokens, *_ in engine.seen[-2:]]
        assert [text.endswith("</think>\n\n") for text in texts] == [effort == "none"] * 2


def test_messages_refuse(anthropic: Anthropic) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(AnthropicBadRequest, match="image"):
        anthropic.messages.create(model="fake", max_tokens=9, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(AnthropicBadRequest, match="thinking"):
        anthropic.messages.create(model="fake", max_tokens=2000, messages=HELLO, thinking={"type": "deep"})
