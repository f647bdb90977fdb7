"""/v1/completions: prompts in all forms, echo, logprobs and streams."""

from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.test_chat import HELLO, chunks_of

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_full_response(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = " and then some"
    answer = await post(client, prompt="First")
    assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == " and then some"
    assert engine.seen[0][0] == engine.tokenizer.encode("First") and engine.seen[0][1].max_tokens == 16


async def test_prompts_in_all_forms(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    ids = [engine.tokenizer.encode(text) for text in ("one two", "three")]
    for prompt in (["one two", "three"], ids):
        engine.seen.clear()
        answer = await post(client, prompt=prompt, max_tokens=100)
        assert [seen[0] for seen in engine.seen] == ids
        assert [choice["text"] for choice in answer["choices"]] == ["one two", "three"]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert (await post(client, prompt=ids[0], max_tokens=100))["choices"][0]["text"] == "one two"


async def test_choices_of_several_prompts_and_n(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    prompts = ["one two", "three", "four"]
    answer = await post(client, prompt=prompts, n=2, max_tokens=100)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [text for text in prompts for _ in range(2)]
    body = {"prompt": prompts, "n": 2, "max_tokens": 100, "stream": True}
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks_of(await client.post(PATH, json=body)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert [texts[index] for index in range(6)] == [text for text in prompts for _ in range(2)]
    assert reasons == dict.fromkeys(range(6), "stop")


@pytest.mark.parametrize(("path", "prompt"), [(PATH, {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": HELLO})])
async def test_every_token_has_a_chunk(
    engine: FakeEngine, client: httpx.AsyncClient, path: str, prompt: dict[str, Any]
) -> None:
    engine.says = "a \N{SNOWMAN} and \N{GRINNING FACE}"  # several tokens a character
    chunks = chunks_of(await client.post(path, json={**prompt, "max_tokens": 100, "stream": True}))
    if path != PATH:
        assert chunks.pop(0)["choices"][0]["delta"]["role"] == "assistant"
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice["text"] if path == PATH else choice["delta"]["content"] for choice in choices]
    assert len(texts) == len(engine.tokenizer.encode(engine.says)) and "" in texts
    assert "".join(texts) == engine.says


async def test_logprobs_are_four_parallel_lists(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "red green blue"
    told = (await post(client, prompt="Colours:", logprobs=2))["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == "red green blue" and told["text_offset"][1] == len(told["tokens"][0])
    assert set(told["token_logprobs"]) == {-0.25} and all(len(top) == 3 for top in told["top_logprobs"])
    chunks = chunks_of(await client.post(PATH, json={"prompt": "Colours:", "logprobs": 2, "stream": True}))
    parts = [part for chunk in chunks if (part := chunk["choices"][0]["logprobs"])]
    assert {name: [item for part in parts for item in part[name]] for name in told} == told


async def test_echo_with_scores(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = " you"
    (choice,) = (await post(client, prompt="How are", echo=True, logprobs=0))["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "How are you" == "".join(told["tokens"])
    assert told["token_logprobs"][0] is None and None not in told["token_logprobs"][1:]
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert choice["text"].startswith(token, offset)
    chunks = chunks_of(await client.post(PATH, json={"prompt": "How are", "echo": True, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "How are you"


async def test_echo_alone_generates_nothing(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt="How are", echo=True, logprobs=1, max_tokens=0)
    assert answer["choices"][0]["text"] == "How are" and answer["usage"]["completion_tokens"] == 0
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


async def test_prompt_logprobs_and_token_ids(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    ids = engine.tokenizer.encode("How are")
    (choice,) = (await post(client, prompt=ids, prompt_logprobs=1, return_token_ids=True))["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and [str(token) in entry for token, entry in zip(ids[1:], rest, strict=True)]
    assert choice["prompt_token_ids"] == ids and choice["token_ids"] == ids
    chunks = chunks_of(await client.post(PATH, json={"prompt": ids, "return_token_ids": True, "stream": True}))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids


async def test_tokens_spelled_as_ids(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    ids = engine.tokenizer.encode("How are")
    answer = await post(client, prompt=ids, logprobs=0, return_tokens_as_token_ids=True)
    assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 7]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"prompt": "x" * 200_000}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 101}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
async def test_refused_by_name(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await client.post(PATH, json=body)
    assert response.status_code == 400 and param in response.json()["error"]["message"], response.text
    assert response.json()["error"]["param"] in (param, None)


async def test_a_refusal_of_the_engine_is_a_bad_request(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.refuses = "stop_token_ids: token id 9999 is outside the vocabulary"
    for stream in (False, True):
        response = await client.post(PATH, json={"prompt": ["a", "b"], "stream": stream})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_token_ids")
    assert not engine.open
