"""/v1/chat/completions: the format of responses and streams, and what is passed to the engine."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.server.conftest import open_client
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == "" and all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def message_of(content: str) -> dict[str, Any]:
    """A message with content only: the other fields of the API are null, as in vLLM."""
    unused = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    return {"role": "assistant", "content": content, **unused}


async def test_a_full_response(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says, engine.cached = "Good day to you.", 3
    response = await client.post(PATH, json={"model": "fake", "messages": HELLO})
    answer = response.json()
    assert response.status_code == 200
    (choice,) = answer["choices"]
    assert choice["message"] == message_of("Good day to you.")
    assert (choice["finish_reason"], choice["index"], answer["object"]) == ("stop", 0, "chat.completion")
    prompt, params, _ = engine.seen[0]
    expected = engine.tokenizer.encode_chat(HELLO)
    assert prompt == expected and params.max_tokens is None
    num_output = len(engine.tokenizer.encode("Good day to you."))
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_output,
        "total_tokens": len(prompt) + num_output,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_has_role_content_reason_usage_and_done(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "One, two, three."
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    first, *rest, usage = chunks_of(await client.post(PATH, json=body))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in rest) == "One, two, three."
    assert all(chunk["usage"] is None for chunk in rest) and rest[-1]["choices"][0]["delta"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest] == [None] * (len(rest) - 1) + ["stop"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(rest)
    assert len({chunk["id"] for chunk in (first, *rest, usage)}) == 1


async def test_the_last_chunk_has_the_reason_even_without_text(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "One<|im_end|>"
    for path, request in ((PATH, {"messages": HELLO}), ("/v1/completions", {"prompt": "Hello"})):
        chunks = chunks_of(await client.post(path, json={**request, "stream": True}))
        (choice,) = chunks[-1]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert not choice.get("text") and not choice.get("delta", {}).get("content")
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


async def test_the_fingerprint_ends_a_stream(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    """As in vLLM, one chunk has it: the last one, with the finish reason or with the usage."""
    for path, request in ((PATH, {"messages": HELLO}), ("/v1/completions", {"prompt": "Hello"})):
        fingerprint = (await client.post(path, json=request)).json()["system_fingerprint"]
        assert re.fullmatch(r"nanovllm-[\w.+-]+-[0-9a-f]{8}", fingerprint)
        for options in ({}, {"stream_options": {"include_usage": True}}):
            chunks = chunks_of(await client.post(path, json={**request, "stream": True, **options}))
            assert [chunk.get("system_fingerprint") for chunk in chunks] == [None] * (len(chunks) - 1) + [fingerprint]


async def test_the_fingerprint_changes_with_the_options() -> None:
    found = set()
    for max_model_len in (512, 256, 512):
        async with open_client(FakeEngine(max_model_len=max_model_len)) as client:
            answer = await client.post(PATH, json={"messages": HELLO})
            found.add(answer.json()["system_fingerprint"])
    assert len(found) == 2


async def test_usage_is_sent_only_on_request(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    chunks = chunks_of(await client.post(PATH, json={"messages": HELLO, "stream": True}))
    assert all("usage" not in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(await client.post(PATH, json={"messages": HELLO, "stream": True, "stream_options": options}))
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told) and told[0] == 0 and len(set(told)) > 2
    assert chunks[0]["usage"]["total_tokens"] == chunks[0]["usage"]["prompt_tokens"]


async def test_roles_of_all_choices_come_before_the_first_token(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "n": 3, "stream": True, "stream_options": options}
    chunks = chunks_of(await client.post(PATH, json=body))
    first, rest = chunks[:3], chunks[3:-1]
    assert [chunk["choices"][0]["index"] for chunk in first] == [0, 1, 2]
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in first)
    assert [chunk["usage"]["completion_tokens"] for chunk in first] == [0, 0, 0]
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)


async def test_every_sampling_field_reaches_the_engine(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 11,
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 1,
        "allowed_token_ids": [4, 5],
        "skip_special_tokens": False,
    }
    extra = {"logit_bias": {"7": -1.5}, "stop": "X", "max_completion_tokens": 9, "priority": 3, "cache_salt": "s"}
    response = await client.post(PATH, json={"messages": HELLO, **fields, **extra, "user": "me", "bad_words": ["no"]})
    assert response.status_code == 200 and len(response.json()["choices"]) == 2
    _, params, rest = engine.seen[0]
    for name, value in fields.items():
        found = getattr(params, name)
        assert (list(found) if isinstance(found, tuple) else found) == value, name
    assert (params.logit_bias, params.stop, params.max_tokens, params.bad_words) == ({7: -1.5}, ("X",), 9, ("no",))
    assert rest == {"priority": 3, "cache_salt": "s"}


async def test_logprobs(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "Hi ñ"
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    content = (await client.post(PATH, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "Hi ñ"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.25 for entry in content)
    assert content[0]["top_logprobs"][1]["logprob"] == -2.0
    chunks = chunks_of(await client.post(PATH, json={**body, "stream": True}))
    streamed = [entry for chunk in chunks if (told := chunk["choices"][0]["logprobs"]) for entry in told["content"]]
    assert streamed == content


async def test_token_ids_are_returned(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "seven eggs"
    prompt, tokens = engine.tokenizer.encode_chat(HELLO), engine.tokenizer.encode("seven eggs")
    body = {"messages": HELLO, "return_token_ids": True}
    answer = (await client.post(PATH, json=body)).json()
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, tokens)
    chunks = chunks_of(await client.post(PATH, json={**body, "stream": True}))
    assert chunks[0]["prompt_token_ids"] == prompt
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == tokens


async def test_template_options(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    def body(**options: Any) -> dict[str, Any]:
        return {"messages": [*HELLO, {"role": "assistant", "content": "The sum"}], **options}

    async def prompt(**options: Any) -> str:
        response = await client.post(PATH, json=body(**options))
        assert response.status_code == 200, response.text
        return engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)

    assert (await prompt()).endswith("The sum<|im_end|>\n<|im_start|>assistant\n")
    assert (await prompt(add_generation_prompt=False)).endswith("The sum<|im_end|>\n")
    assert (await prompt(continue_final_message=True)).endswith("The sum")
    assert (await prompt(chat_template_kwargs={"enable_thinking": False})).endswith("</think>\n\n")


async def test_content_parts_developer_role_and_past_calls(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    assert (await client.post(PATH, json={"messages": messages})).status_code == 200
    text = engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text and "one\ntwo<|im_end|>" in text
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text


# --- reasoning and tools ----------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
]
CALLING = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


async def test_reasoning_and_calls_are_split_from_the_text(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = CALLING
    choice = (await client.post(PATH, json={"messages": HELLO, "tools": TOOLS})).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning"] == message["reasoning_content"] == "Hm." and message["content"] is None
    function = message["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("add", {"a": 2})
    chunks = chunks_of(await client.post(PATH, json={"messages": HELLO, "tools": TOOLS, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert parts[0]["function"]["name"] == "add" and parts[0]["id"]
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"a": 2}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_reasoning_tokens_are_counted(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    """The tokens between the tags are counted, in all completions."""
    engine.says = "<think>\nHm.\n</think>\n\nYes."
    expected = len(engine.tokenizer.encode("\nHm.\n"))
    for n in (1, 2):
        usage = (await client.post(PATH, json={"messages": HELLO, "n": n})).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": n * expected}
        body = {"messages": HELLO, "n": n, "stream": True, "stream_options": {"include_usage": True}}
        assert chunks_of(await client.post(PATH, json=body))[-1]["usage"] == usage
    usage = (await client.post("/v1/responses", json={"input": "Hello"})).json()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": expected}
    engine.says = "Yes </think> or no"
    usage = (await client.post(PATH, json={"messages": HELLO})).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_can_be_left_out(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "<think>\nHm.\n</think>\n\nYes."
    body = {"messages": HELLO, "include_reasoning": False}
    message = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
    assert message == message_of("Yes.")


async def test_a_forced_call_is_held_to_its_schema(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = '{"name": "add", "arguments": {"a": 2}}'
    choice = {"type": "function", "function": {"name": "add"}}
    answer = (await client.post(PATH, json={"messages": HELLO, "tools": TOOLS, "tool_choice": choice})).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    schema = json.loads(engine.seen[0][1].structured_outputs.json)
    assert schema["properties"]["name"] == {"const": "add"}


async def test_no_tools_are_offered_with_tool_choice_none(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "No."
    for choice, offered in (("none", False), ("auto", True)):
        await client.post(PATH, json={"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
        assert ("You may call" in engine.tokenizer.decode(engine.seen[-1][0])) == offered


@pytest.mark.parametrize(
    ("field", "value", "kind", "expected"),
    [
        ("response_format", {"type": "json_object"}, "json_object", True),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            "json",
            '{"type": "object"}',
        ),
        ("structured_outputs", {"regex": "a+"}, "regex", "a+"),
        ("structured_outputs", {"choice": ["a", "b"]}, "choice", ("a", "b")),
    ],
)
async def test_formats_reach_the_engine(
    engine: FakeEngine, client: httpx.AsyncClient, field: str, value: Any, kind: str, expected: Any
) -> None:
    response = await client.post(PATH, json={"messages": HELLO, field: value})
    assert response.status_code == 200, response.text
    found = getattr(engine.seen[0][1].structured_outputs, kind)
    assert json.loads(found) == json.loads(expected) if kind == "json" else found == expected


async def test_an_unknown_role_is_refused_with_the_known_ones(client: httpx.AsyncClient) -> None:
    for message, found in (({"role": "robot"}, "has the role 'robot'"), ({}, "has no role")):
        for path in (PATH, "/tokenize"):
            body = {"messages": [*HELLO, {"content": "Hello", **message}]}
            refused = (await client.post(path, json=body)).json()["error"]
            roles = "it must be one of system, developer, user, assistant, tool"
            assert refused["message"] == f"messages: messages[1] {found}; {roles}" and refused["param"] == "messages"
    body = {"input": [{"role": "robot", "content": "Hello"}]}
    refused = (await client.post("/v1/responses", json=body)).json()["error"]
    assert refused["param"] == "input" and "'robot'" in refused["message"] and "developer" in refused["message"]


async def test_an_invalid_bias_is_named(client: httpx.AsyncClient) -> None:
    cases = {"foo": 1, "-1": 1, "1.5": 1, str(2**40): 1, "7": "x", "8": True, "": 0}
    for key, value in cases.items():
        response = await client.post(PATH, json={"messages": HELLO, "logit_bias": {"5": 1, key: value}})
        refused = response.json()["error"]
        assert response.status_code == 400 and refused["param"] == "logit_bias"
        assert refused["message"].startswith("logit_bias: ") and repr(key) in refused["message"], refused


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "utmost"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": {}}, "guided_json"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"priority": 2**40}, "priority"),
        ({"top_k": 2**70}, "top_k"),
        ({"seed": 2**80}, "seed"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"shape": "round"}}, "structured_outputs"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"content": "Hello"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
    ],
)
async def test_refused_by_name(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await client.post(PATH, json={"messages": HELLO, **fields})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error" and error["param"] == param and param in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "service_tier": "auto", "modalities": ["text"], "metadata": {"a": "b"}, "user": "me"},
        {"functions": [], "audio": None, "use_beam_search": False, "best_of": 1, "echo": False, "length_penalty": 1.0},
        {"prompt_cache_key": "x", "safety_identifier": "y", "something_nobody_knows": {"deep": []}},
        {name: None for name in ("n", "temperature", "stop", "tools", "response_format", "logit_bias", "seed")},
    ],
)
async def test_neutral_values_are_accepted(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await client.post(PATH, json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json={"model": "gpt-9", "messages": HELLO})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


async def test_served_names(engine: FakeEngine) -> None:
    async with open_client(engine, served_model_name=("a", "b")) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["a", "b"]
        answer = (await client.post(PATH, json={"model": "b", "messages": HELLO})).json()
        assert answer["model"] == "b"
        assert (await client.post(PATH, json={"model": "fake", "messages": HELLO})).status_code == 404


async def test_without_a_tokenizer_chats_are_refused(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.tokenizer = None
    response = await client.post(PATH, json={"messages": HELLO})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_tokenizer")
    assert (await client.post("/v1/completions", json={"prompt": [5, 6, 7]})).status_code == 200
