"""Every field of vLLM's requests is implemented or refused by name, and what the implemented ones do."""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm.engine.deltas import Delta
from nanovllm.sampling_params import SamplingParams
from nanovllm.server import chat, completions, embeddings, messages, protocol, responses, tokens
from nanovllm.server.intervals import in_intervals
from nanovllm.server.openapi import POSTS
from nanovllm.server.protocol import ApiRequest, StreamOptions
from nanovllm.server.structured import KINDS, NEUTRAL
from nanovllm.server.unsupported import WITHOUT_EFFECT
from tests.server.fake_engine import FakeEngine
from tests.server.test_chat import HELLO, TOOLS, chunks_of

pytestmark = pytest.mark.anyio
OF_VLLM = json.loads((Path(__file__).parent / "data" / "vllm_fields.json").read_text())
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATHS = {  # vLLM's request type -> path
    "ChatCompletionRequest": CHAT,
    "CompletionRequest": COMPLETIONS,
    "EmbeddingRequest": "/v1/embeddings",
    "TokenizeRequest": "/tokenize",
    "DetokenizeRequest": "/detokenize",
    "ResponsesRequest": RESPONSES,
    "AnthropicMessagesRequest": "/v1/messages",
    "AnthropicCountTokensRequest": "/v1/messages/count_tokens",
}
SMALLEST: dict[str, dict[str, Any]] = {  # the fields that a request must have
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
    RESPONSES: {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HELLO},
}


@pytest.mark.parametrize("name", PATHS)
def test_every_field_of_vllm_is_known(name: str) -> None:
    kind = POSTS[PATHS[name]][0]
    known = {*kind.__struct_fields__, *kind.unsupported, *WITHOUT_EFFECT}
    assert set(OF_VLLM[name]) - known == set()


def test_every_field_within_fields_is_known() -> None:
    assert set(OF_VLLM["StreamOptions"]) <= set(StreamOptions.__struct_fields__)
    known = {*KINDS, *NEUTRAL}  # others are refused by name
    assert set(OF_VLLM["StructuredOutputsParams"]) - known == {"whitespace_pattern", "structural_tag"}


@pytest.mark.parametrize("path", POSTS)
async def test_unsupported_fields_are_refused_by_name(path: str, client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for field, neutral in POSTS[path][0].unsupported.items():
        refused = await client.post(path, json={**SMALLEST[path], field: {"some": "thing"}})
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400 and message.startswith(f"{field}: is not supported"), refused.text
        for value in (None, *neutral):
            accepted = await client.post(path, json={**SMALLEST[path], field: value})
            assert accepted.status_code == 200, (field, value, accepted.text)


class Recorder:
    """A request that records which of its fields are read."""

    def __init__(self, request: ApiRequest, reads: set[str]) -> None:
        self.__dict__.update(request=request, reads=reads)

    def __getattr__(self, name: str) -> Any:
        self.reads.add(name)
        return getattr(self.request, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.request, name, value)


FULLEST: dict[str, list[dict[str, Any]]] = {  # requests in which every field is looked at
    CHAT: [{"logprobs": True, "stream": True}, {"echo": True, "tools": TOOLS}],
    COMPLETIONS: [{"logprobs": 1, "stream": True}, {"echo": True}],
    "/tokenize": [{"prompt": None, "messages": HELLO}],
    RESPONSES: [{"stream": True}],
    "/v1/messages": [{"stream": True}],
}


@pytest.mark.parametrize("path", POSTS)
async def test_every_declared_field_is_read(
    path: str, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that is declared and never read would be accepted and ignored."""
    kind, reads = POSTS[path][0], set[str]()
    for module in (chat, completions, embeddings, messages, responses, tokens):
        monkeypatch.setattr(
            module, "parse_request", lambda body, kind: Recorder(protocol.parse_request(body, kind), reads)
        )
    for more in ({}, *FULLEST.get(path, [])):
        answer = await client.post(path, json={**SMALLEST[path], **more})
        assert answer.status_code == 200, answer.text
    optional = {"include_usage": {"stream_options"}, "continuous_usage": {"stream_options"}}
    for name, fields in optional.items():
        reads |= fields if name in reads else set()
    unused = {"stream", "priority", "cache_salt"} if path.endswith("count_tokens") else set()
    assert set(kind.__struct_fields__) - set(kind.unsupported) - reads == unused


async def test_labels_and_hints_are_accepted(client: httpx.AsyncClient) -> None:
    for path, (kind, _, _) in POSTS.items():
        labels = dict.fromkeys(WITHOUT_EFFECT.difference(kind.__struct_fields__), "x")
        answer = await client.post(path, json={**SMALLEST[path], **labels})
        assert answer.status_code == 200, answer.text


async def test_unknown_fields_are_logged(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"frobnicate": 1, "x" * 500: 2, "new\nline": 3, "empty": None, "user": "me"}
    with caplog.at_level(logging.WARNING, "nanovllm"):
        assert (await client.post(CHAT, json={"messages": HELLO, **fields})).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("a request has 3 unknown fields, which are ignored: 'frobnicate', 'xxx")
    assert "\n" not in line and len(line) < 200


# --- what the fields do -----------------------------------------------------------------------------------------------


async def test_truncated_prompts(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    ids = list(range(100, 160))

    async def kept(**fields: Any) -> list[int]:
        answer = await client.post(COMPLETIONS, json={"prompt": ids, **fields})
        assert answer.status_code == 200, answer.text
        return engine.seen[-1][0]

    assert await kept(truncate_prompt_tokens=7) == ids[-7:]
    assert await kept(truncate_prompt_tokens=7, truncation_side="left") == ids[-7:]
    assert await kept(truncate_prompt_tokens=7, truncation_side="right") == ids[:7]
    assert await kept(truncate_prompt_tokens=100) == ids == await kept(truncation_side="right")
    assert len(await kept(prompt=[5] * 600, truncate_prompt_tokens=-1, max_tokens=12)) == 512 - 12
    body = {"messages": [{"role": "user", "content": "word " * 600}], "truncate_prompt_tokens": -1}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert len(engine.seen[-1][0]) == 511
    end = engine.tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", False)
    assert engine.seen[-1][0][-len(end) :] == end
    for side, token in ((None, 100), ("right", 100), ("left", 159)):
        body = {"input": ids, "truncate_prompt_tokens": 1, "truncation_side": side}
        answer = await client.post("/v1/embeddings", json=body)
        assert answer.json()["usage"]["prompt_tokens"] == 1 and engine.embedded[-1] == [token]
    assert (await client.post("/v1/embeddings", json={"input": [5] * 600, "truncate_prompt_tokens": -1})).is_success
    assert engine.embedded[-1] == [5] * 512
    for fields in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "top"}):
        for path in (CHAT, COMPLETIONS, "/v1/embeddings"):
            refused = await client.post(path, json={**SMALLEST[path], **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, *fields)


async def test_a_truncated_prompt_is_echoed_as_it_was_used(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "!"
    body = {"prompt": "one two three", "truncate_prompt_tokens": 1, "echo": True, "logprobs": 0}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    last = engine.tokenizer.decode(engine.tokenizer.encode("one two three")[-1:])
    assert choice["text"] == f"{last}!" and choice["logprobs"]["text_offset"] == [0, len(last)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_interval(path: str, engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "One, two, three, four, five, six, seven, eight."
    num_tokens = len(engine.tokenizer.encode(engine.says))
    body = {**SMALLEST[path], "max_tokens": 100, "stream": True, "return_token_ids": True, "n": 2}
    body["logprobs"] = True if path == CHAT else 1
    for interval in (1, 4, 1000):
        chunks = chunks_of(await client.post(path, json={**body, "stream_interval": interval}))
        for index in range(2):
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            sizes = [len(choice["token_ids"]) for choice in choices if "token_ids" in choice]
            rest = num_tokens - 1
            assert sizes == [1] + [interval] * (rest // interval) + [rest % interval] * (rest % interval > 0)
            texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
            assert "".join(texts) == engine.says and choices[-1]["finish_reason"] == "stop"
    refused = await client.post(path, json={**body, "stream_interval": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_interval")


async def test_a_stream_with_intervals_is_aborted_as_others(engine: FakeEngine) -> None:
    async def deltas() -> AsyncGenerator[tuple[int, Delta], None]:
        async with aclosing(engine.submit([5, 6, 7], SamplingParams(), request_id="a")) as submitted:
            async for delta in submitted:
                yield 0, delta

    stream = in_intervals(deltas(), 2)
    await anext(stream)
    await stream.aclose()
    assert engine.aborted == ["a"]


async def test_a_chat_is_echoed(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = " is 4."
    said = [{"type": "text", "text": "The"}, {"type": "text", "text": "sum"}]
    for content, begin in (("The sum", "The sum"), (said, "The\nsum")):
        asked = [*HELLO, {"role": "assistant", "content": content}]
        body = {"messages": asked, "echo": True, "continue_final_message": True, "n": 2}
        answer = (await client.post(CHAT, json=body)).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == [f"{begin} is 4."] * 2
        chunks = chunks_of(await client.post(CHAT, json={**body, "stream": True}))
        for index in range(2):
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(delta.get("content", "") for delta in deltas) == f"{begin} is 4."
    answer = (await client.post(CHAT, json={"messages": HELLO, "echo": True})).json()
    assert answer["choices"][0]["message"]["content"] == " is 4."  # the last message is the user's


async def test_the_prompt_is_returned_as_text(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    text = engine.tokenizer.render_chat(HELLO)
    body = {"messages": HELLO, "return_prompt_text": True}
    assert (await client.post(CHAT, json=body)).json()["prompt_text"] == text
    first, *rest = chunks_of(await client.post(CHAT, json={**body, "stream": True}))
    assert first["prompt_text"] == text and not any("prompt_text" in chunk for chunk in rest)
    assert (await client.post(CHAT, json={"messages": HELLO})).json()["prompt_text"] is None


async def test_the_id_of_a_response_can_be_chosen(client: httpx.AsyncClient) -> None:
    for path, id in ((CHAT, "chatcmpl-mine"), (COMPLETIONS, "cmpl-mine"), ("/v1/embeddings", "embd-mine")):
        assert (await client.post(path, json={**SMALLEST[path], "request_id": "mine"})).json()["id"] == id
    answer = await client.post(RESPONSES, json={"input": "Hello", "request_id": "resp_mine"})
    assert answer.json()["id"] == "resp_mine"


async def test_salts_reach_the_engine(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, "/v1/messages"):
        assert (await client.post(path, json={**SMALLEST[path], "cache_salt": path})).status_code == 200
        assert engine.seen[-1][2]["cache_salt"] == path


async def test_reasoning_can_be_left_out_of_responses(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "<think>\nHm.\n</think>\n\nYes."
    for wanted, kinds in ((True, ["reasoning", "message"]), (False, ["message"])):
        body = {"input": "Hello", "include_reasoning": wanted}
        output = (await client.post(RESPONSES, json=body)).json()["output"]
        assert [item["type"] for item in output] == kinds


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
async def test_structured_output_as_in_llama_cpp(path: str, engine: FakeEngine, client: httpx.AsyncClient) -> None:
    forms: list[dict[str, Any]] = [{"json_schema": SCHEMA}]
    if path != RESPONSES:
        forms += [{"response_format": {"type": kind, "schema": SCHEMA}} for kind in ("json_object", "json_schema")]
    for form in forms:
        answer = await client.post(path, json={**SMALLEST[path], **form})
        assert answer.status_code == 200, answer.text
        assert json.loads(engine.seen[-1][1].structured_outputs.json) == SCHEMA
    answer = await client.post(path, json={**SMALLEST[path], "grammar": 'root ::= "a" | "b"'})
    assert answer.status_code == 200 and engine.seen[-1][1].structured_outputs.grammar == 'root ::= "a" | "b"'
    assert (await client.post(path, json={**SMALLEST[path], "grammar": ""})).status_code == 200
    assert engine.seen[-1][1].structured_outputs is None
    for form, param in (
        ({"grammar": "root ::= [0-9]", "json_schema": SCHEMA}, "grammar"),
        ({"json_schema": SCHEMA, "structured_outputs": {"regex": "a"}}, "json_schema"),
        ({"json_schema": "text"}, "json_schema"),
    ):
        refused = await client.post(path, json={**SMALLEST[path], **form})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_options_of_structured_outputs_that_change_nothing(client: httpx.AsyncClient) -> None:
    for name in NEUTRAL:
        for value, status in ((False, 200), (True, 400)):
            body = {"messages": HELLO, "structured_outputs": {"regex": "a", name: value}}
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == status and (status == 200 or name in answer.text)
    refused = await client.post(CHAT, json={"messages": HELLO, "response_format": {"type": "json_object", "schema": 3}})
    assert refused.status_code == 400 and "schema must be" in refused.text
