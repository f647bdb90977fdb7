"""Logprobs of /v1/completions for text with multi-byte characters: distinct tokens and true offsets."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nanovllm.engine.deltas import TokenScores
from nanovllm.server.scores import CompletionLogprobs, TokenFormatter, concatenated
from nanovllm.server.text_offsets import TextOffsets, prompt_offsets
from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER
from tests.server.fake_engine import FakeEngine
from tests.server.process import ServerProcess, server_process
from tests.server.test_chat import chunks_of

PATH = "/v1/completions"
TEXT = "naïve 世界 🙂!"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("model")) as server:
        yield server


def check(text: str, logprobs: dict[str, Any]) -> None:
    """Every token is where its offset says; the parts of a character are where the character is."""
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert len(tokens) == len(offsets) and offsets == sorted(offsets) and offsets[-1] <= len(text)
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\ufffd" not in token
        cut_off = token.startswith(text[offset:])  # by a stop string
        assert token.startswith(("bytes:", "<|")) or text.startswith(token, offset) or cut_off, (token, offset)


def bytes_of(tokens: list[str]) -> bytes:
    parts = []
    for token in tokens:
        hidden = token.removeprefix("bytes:")
        parts.append(token.encode() if hidden == token else hidden.encode().decode("unicode_escape").encode("latin-1"))
    return b"".join(parts)


@pytest.mark.anyio
async def test_parts_of_characters_are_shown_as_bytes(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = TEXT
    body = {"prompt": "Say:", "logprobs": 3, "max_tokens": 100}
    (choice,) = (await client.post(PATH, json=body)).json()["choices"]
    told = choice["logprobs"]
    check(TEXT, told)
    assert choice["text"] == TEXT and bytes_of(told["tokens"]).decode() == TEXT
    assert any(token.startswith("bytes:\\x") for token in told["tokens"])
    chunks = chunks_of(await client.post(PATH, json={**body, "stream": True}))
    assert concatenated([part for chunk in chunks if (part := chunk["choices"][0]["logprobs"])]) == told


@pytest.mark.anyio
async def test_echoed_offsets(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = TEXT
    prompt = f"<|im_start|>user\n{TEXT}<|im_end|>"
    body = {"prompt": prompt, "logprobs": 0, "echo": True, "max_tokens": 100}
    (choice,) = (await client.post(PATH, json=body)).json()["choices"]
    assert choice["text"] == prompt + TEXT
    check(choice["text"], choice["logprobs"])
    assert len(prompt) in choice["logprobs"]["text_offset"]


def test_completions_of_an_engine(server: ServerProcess) -> None:
    """Random weights generate many parts of characters, valid and not."""
    body = {"prompt": "Once", "logprobs": 8, "n": 4, "seed": 1, "max_tokens": 60, "ignore_eos": True}
    for options in ({}, {"skip_special_tokens": False}, {"echo": True}, {"stop": ["e", "th"]}):
        choices = httpx.post(server.url + PATH, json={**body, **options}, timeout=60).json()["choices"]
        for choice in choices:
            told = choice["logprobs"]
            assert all(offset <= len(choice["text"]) for offset in told["text_offset"])
            assert all(len(top) in (8, 9) for top in told["top_logprobs"] if top is not None)
            if "\ufffd" not in choice["text"]:
                check(choice["text"], told)


def test_named_tokens(server: ServerProcess) -> None:
    """As in vLLM: the named tokens and the sampled one, whether it is among them or not."""
    ids, plain = [7, 300, 42], {"max_tokens": 3, "return_tokens_as_token_ids": True}
    for sampled in (42, 50):
        body = {**plain, "logprob_token_ids": ids, "allowed_token_ids": [sampled]}
        expected = {f"token_id:{token}" for token in (*ids, sampled)}
        for stream in (False, True):
            asked = {**body, "prompt": "Once", "logprobs": 5, "stream": stream}
            answer = httpx.post(server.url + PATH, json=asked, timeout=60)
            choices = [chunk["choices"][0] for chunk in (chunks_of(answer) if stream else [answer.json()])]
            tops = [top for choice in choices if choice["logprobs"] for top in choice["logprobs"]["top_logprobs"]]
            assert [set(top) for top in tops] == [expected] * 3
        asked = {**body, "messages": [{"role": "user", "content": "Once"}], "logprobs": True, "top_logprobs": 1}
        answer = httpx.post(server.url + "/v1/chat/completions", json=asked, timeout=60).json()
        for entry in answer["choices"][0]["logprobs"]["content"]:
            told = [top["token"] for top in entry["top_logprobs"]]
            assert set(told) == expected and len(told) == len(expected)
    for refused in ({}, {"logprobs": 1, "echo": True, "max_tokens": 0}):
        body = {"prompt": "Once", "logprob_token_ids": ids, **refused}
        answer = httpx.post(server.url + PATH, json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprob_token_ids")


def scores_of(*token_ids: int) -> TokenScores:
    return TokenScores(list(token_ids), [-1.0] * len(token_ids), 1, [])


def make_logprobs(tokenizer: Tokenizer) -> CompletionLogprobs:
    formatter = TokenFormatter(tokenizer, as_ids=False)
    return CompletionLogprobs(formatter, tokenizer, prompt_token_ids=[], skip_special_tokens=True)


def test_tokens_that_look_alike_have_different_keys() -> None:
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    unknown = tokenizer.vocab_size  # ids that the model has and the tokenizer does not
    told = make_logprobs(tokenizer).format("", [scores_of(unknown, unknown + 1, unknown + 2, unknown)], finished=True)
    assert told is not None
    assert list(told["top_logprobs"][0]) == ["", f"token_id:{unknown + 2}", f"token_id:{unknown}"]


def test_tokens_of_a_stop_string_are_at_the_end_of_the_text() -> None:
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    ids = [tokenizer.encode(text, False)[0] for text in "abcd"]
    logprobs = make_logprobs(tokenizer)
    told = [logprobs.format("a", [scores_of(ids[0])], finished=False)]
    told += [logprobs.format("", [scores_of(ids[1])], finished=False)]  # "bcd" may be the beginning of a stop string
    told += [logprobs.format("", [scores_of(ids[2])], finished=False)]
    assert [part and part["text_offset"] for part in told] == [[0], [1], None]
    told += [logprobs.format("", [scores_of(ids[3])], finished=True)]  # it is one
    assert concatenated(list(filter(None, told)))["text_offset"] == [0, 1, 1, 1]


def test_tokens_held_back_for_no_stop_string_keep_their_offsets() -> None:
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    ids = [tokenizer.encode(text, False)[0] for text in "abcd"]
    logprobs = make_logprobs(tokenizer)
    told = [logprobs.format("", [scores_of(token)], finished=False) for token in ids[:3]]
    told.append(logprobs.format("abcd", [scores_of(ids[3])], finished=False))
    assert concatenated(list(filter(None, told)))["text_offset"] == [0, 1, 2, 3]


def test_offsets_of_special_tokens() -> None:
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    end = tokenizer.encode("<|im_end|>", False)
    a, b = tokenizer.encode("a", False)[0], tokenizer.encode("b", False)[0]
    skipping = TextOffsets(tokenizer)
    assert [skipping.take(token) for token in (a, *end, b)] == [0, 1, 1]
    keeping = TextOffsets(tokenizer, skip_special_tokens=False)
    assert [keeping.take(token) for token in (a, *end, b)] == [0, 1, 11]
    assert prompt_offsets(tokenizer, "a<|im_end|>b", [a, *end, b]) == [0, 1, 11]
    assert prompt_offsets(tokenizer, "ab", [*end, a, *end, b, *end]) == [0, 0, 1, 1, 2]
