"""Health checks, API keys, limits, request ids, metrics, and the small routes."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanovllm import __version__
from nanovllm.errors import ConfigError
from nanovllm.server.app import build_app
from nanovllm.server.settings import ServerSettings
from tests.server.conftest import open_client
from tests.server.fake_engine import TOKENIZER, FakeEngine

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
JSON = {"content-type": "application/json"}


# --- health -----------------------------------------------------------------------------------------------------------


async def test_health_follows_the_engine(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    engine.ill = "stalled in /secret/path"
    response = await client.get("/health")
    assert response.status_code == 503 and "secret" not in response.text
    assert (await client.get("/ready")).status_code == 503


async def test_loading(engine: FakeEngine) -> None:
    app = build_app(None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path in ("/health", "/ready", "/v1/models"):
            response = await client.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "loading"), path
        assert (await client.post(CHAT, json=HELLO)).status_code == 503
        assert (await client.get("/metrics")).status_code == (await client.get("/version")).status_code == 200
        app.state.service.attach(engine)
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_draining_refuses_new_requests(engine: FakeEngine) -> None:
    app = build_app(engine)
    app.state.service.drain()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for response in (await client.get("/health"), await client.get("/ready"), await client.post(CHAT, json=HELLO)):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            assert response.headers["retry-after"]


# --- keys -------------------------------------------------------------------------------------------------------------


async def test_keys(engine: FakeEngine) -> None:
    async with open_client(engine, api_key=("secret", "other")) as client:
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/engine/events", "/nowhere", "/static"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post(CHAT, json=HELLO)).status_code == 401
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
        good: list[Any] = [
            {"Authorization": "Bearer other"},
            {"x-api-key": "secret"},
            {"Authorization": "bearer secret"},
        ]
        for headers in good:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200, headers
        bad: list[Any] = [{"Authorization": "Bearer secre"}, {"Authorization": "secret"}, {"Authorization": "Basic !"}]
        for headers in [*bad, {"Authorization": "Bearer \u00e9".encode()}, {"x-api-key": ""}]:
            response = await client.get("/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), headers
        refused = await client.get("/v1/models", auth=("anyone", "secret"))
        assert refused.headers["www-authenticate"].startswith("Bearer")


async def test_pages_are_open_and_nothing_else_can_be_reached_as_one(engine: FakeEngine) -> None:
    """The pages need no key; they ask the user for the key that their API calls need."""
    async with open_client(engine, api_key=("secret",)) as client:
        for path in ("/", "/engine", "/static/chat.js", "/static/style.css"):
            assert (await client.get(path)).status_code == 200, path
        for path in ("/static/%2e%2e/v1/models", "/static/..%2f..%2fapp.py", "/static//v1/models"):
            assert (await client.get(path)).status_code == 404, path


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty key"):
        ServerSettings(api_key=("",))


async def test_other_origins_are_allowed_by_name_only(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    headers = {"Origin": "http://page.example"}
    assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=headers)).headers
    async with open_client(engine, allowed_origins=("http://page.example",), api_key=("k",)) as allowing:
        preflight = {
            **headers,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        response = await allowing.options(CHAT, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page.example"
        other = await allowing.get("/health", headers={"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'{"messages": "\xff\xfe"}', "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
        (b'{"a":' * 100_000, "deep"),
        (b'{"temperature": NaN}', "JSON"),
        (b'{"temperature": 1e999, "messages": []}', "JSON"),
    ],
)
async def test_bodies_that_are_not_requests(client: httpx.AsyncClient, body: bytes, told: str) -> None:
    response = await client.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400 and told in response.json()["error"]["message"]


async def test_only_json_is_read(client: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = await client.post(CHAT, content=json.dumps(HELLO), headers={"content-type": kind})
        assert response.status_code == 415


async def test_large_bodies_are_refused(engine: FakeEngine) -> None:
    async with open_client(engine, max_body_bytes=1000) as client:
        told = await client.post(CHAT, content=b" " * 1001, headers=JSON)

        async def untold() -> Any:
            for _ in range(11):
                yield b" " * 100

        counted = await client.post(CHAT, content=untold(), headers=JSON)
        assert told.status_code == counted.status_code == 413
        assert told.json()["error"]["code"] == "body_too_large"


async def test_more_prompts_than_the_queue_holds(engine: FakeEngine) -> None:
    async with open_client(engine, max_queued_requests=1) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a"] * 6})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


# --- ids, logs and metrics --------------------------------------------------------------------------------------------


async def test_every_response_has_a_request_id(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/nowhere"):
        assert (await client.get(path)).headers["x-request-id"]
    assert (await client.post(CHAT, json=HELLO, headers={"x-request-id": "mine-7"})).headers["x-request-id"] == "mine-7"
    bad = await client.post(CHAT, json=HELLO, headers={"x-request-id": "a b\t" + "x" * 200})
    assert bad.headers["x-request-id"].isalnum()


async def test_logs_have_numbers_and_no_text(
    engine: FakeEngine, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("nanovllm"), "propagate", True)
    engine.says = "a private answer"
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        body = {"messages": [{"role": "user", "content": "a private question"}]}
        await client.post(CHAT, json=body, headers={"x-request-id": "mine-7"})
    assert "private" not in caplog.text
    assert "request_id=mine-7" in caplog.text and "status=200" in caplog.text and "finish=stop" in caplog.text


READ_BY_DASHBOARDS = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
    *("generation_tokens_total", "request_success_total", "num_preemptions_total", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
}


async def test_metrics_are_read_by_prometheus(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "one two three"
    await client.post(CHAT, json=HELLO)
    await client.post(CHAT, json={**HELLO, "max_tokens": 1})
    await client.post(CHAT, json={**HELLO, "n": 0})
    response = await client.get("/metrics")
    samples = {
        (sample.name, *(sample.labels.get(name) for name in ("finished_reason", "status", "le"))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }

    def value(name: str, reason: str | None = None, status: str | None = None, le: str | None = None) -> float:
        return samples[name, reason, status, le]

    assert value("vllm:request_success_total", "stop") == value("vllm:request_success_total", "length") == 1
    assert value("nanovllm:request_errors_total", status="400") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
        assert value(f"vllm:{name}_count") == value(f"vllm:{name}_bucket", le="+Inf") == 2
    assert value("vllm:request_queue_time_seconds_count") == 2
    assert value("vllm:request_queue_time_seconds_sum") == pytest.approx(0.25)
    assert value("process_cpu_seconds_total") > 0
    assert value("vllm:request_generation_tokens_sum") == len(engine.tokenizer.encode("one two three")) + 1
    assert value("vllm:num_requests_running") == 1 and value("vllm:num_requests_waiting") == 2
    assert value("vllm:kv_cache_usage_perc") == pytest.approx(0.2)
    assert value("vllm:prefix_cache_hits_total") == 40 and value("vllm:generation_tokens_total") == 500
    assert 'model_name="fake"' in response.text
    names = {name.removeprefix("vllm:") for name, *_ in samples}
    assert READ_BY_DASHBOARDS - names == set()


# --- small routes -----------------------------------------------------------------------------------------------------


async def test_models_and_version(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 512)
    assert (await client.get("/v1/models/fake")).json() == card
    assert (await client.get("/v1/models/other")).status_code == 404
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_paths_without_a_version(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    """Clients of llama.cpp's server leave /v1 out."""
    bodies: dict[str, dict[str, Any]] = {
        "/chat/completions": HELLO,
        "/completions": {"prompt": "Hello"},
        "/embeddings": {"input": "Hello"},
        "/responses": {"input": "Hello"},
    }
    for path, body in bodies.items():
        answers = [(await client.post(prefix + path, json=body)).json() for prefix in ("", "/v1")]
        assert answers[0].keys() == answers[1].keys() and answers[0]["usage"] == answers[1]["usage"], path
    for path in ("/models", "/models/fake", "/health"):
        assert (await client.get(path)).json() == (await client.get("/v1" + path)).json() != {}
    async with open_client(engine, api_key=("secret",)) as closed:
        for path, body in bodies.items():
            assert (await closed.post(path, json=body)).status_code == 401
        assert (await closed.get("/models")).status_code == 401
        assert (await closed.get("/v1/health")).status_code == 200


async def test_load(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    assert (await client.get("/load")).json() == {"server_load": 0}
    engine.gate = asyncio.Event()
    asking = [asyncio.create_task(client.post(CHAT, json=HELLO)) for _ in range(3)]
    async with asyncio.timeout(10):
        while len(engine.open) < 3:
            await asyncio.sleep(0)
    assert (await client.get("/load")).json() == {"server_load": 3}
    engine.gate.set()
    await asyncio.gather(*asking)
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_tokenizer_info(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    told = (await client.get("/tokenizer_info")).json()
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    assert told["chat_template"] == engine.tokenizer.chat_templates["default"]
    assert (told["eos_token"], told["model_max_length"]) == ("<|im_end|>", 512)
    assert told["added_tokens_decoder"]["1"] == {"content": "<|im_start|>", "special": True}
    assert told["tokenizer_class"] and told["vocab_size"] == engine.tokenizer.vocab_size
    assert told["eos_token"] == config["eos_token"]
    engine.tokenizer = None
    assert (await client.get("/tokenizer_info")).json()["error"]["code"] == "no_tokenizer"


async def test_unknown_paths_and_methods(client: httpx.AsyncClient) -> None:
    for response, status in (
        (await client.get("/v1/nothing"), 404),
        (await client.get(CHAT), 405),
        (await client.post("/health"), 405),
    ):
        assert response.status_code == status and response.json()["error"]["message"]


async def test_tokenize_and_back(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    text = "Natalia sold 48 clips 🙂"
    answer = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["tokens"] == engine.tokenizer.encode(text) and answer["count"] == len(answer["token_strs"])
    assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": text}
    chat = (await client.post("/tokenize", json=HELLO)).json()
    assert chat["tokens"] == engine.tokenizer.encode_chat(HELLO["messages"])
    for body in ({}, {"prompt": "a", **HELLO}):
        assert (await client.post("/tokenize", json=body)).status_code == 400
    for tokens in ([-1], [600], [2**70], ["a"]):
        assert (await client.post("/detokenize", json={"tokens": tokens})).status_code == 400


async def test_openapi_names_every_post(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        if "post" in operations:
            assert (await client.post(path, json={})).status_code == 400, path
    for name, schema in document["components"]["schemas"].items():
        assert schema["type"] == "object", name
    assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]


async def test_pages_are_served_with_a_policy(client: httpx.AsyncClient) -> None:
    for path in ("/", "/engine"):
        response = await client.get(path)
        assert response.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in response.headers["content-security-policy"]
    assert (await client.get("/static/style.css")).status_code == 200
    assert (await client.get("/static/../app.py")).status_code == 404


async def test_embeddings(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/embeddings", json={"input": ["one two", "three"]})).json()
    lengths = [len(engine.tokenizer.encode(text)) for text in ("one two", "three")]
    assert [item["embedding"] for item in answer["data"]] == [[0.6, 0.8, float(length)] for length in lengths]
    assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    last = (await client.post("/v1/embeddings", json={"input": [5, 6], "pooling": "last"})).json()
    assert last["data"][0]["embedding"] == [0.8, 0.8, 2.0]
    for fields in ({"dimensions": 2}, {"encoding_format": "int8"}, {"pooling": "max"}, {"input": []}):
        assert (await client.post("/v1/embeddings", json={"input": "a", **fields})).status_code == 400, fields
    engine.refuses = "the input has 600 tokens: at least 1 and at most 500 can be embedded"
    refused = await client.post("/v1/embeddings", json={"input": ["a"]})
    assert refused.status_code == 400 and refused.json()["error"]["message"] == f"input: {engine.refuses}"


async def test_an_embedding_input_that_is_too_long_is_named(client: httpx.AsyncClient) -> None:
    for given, named in (([5] * 513, "input"), ([[5], [5] * 513], "input[1]")):
        refused = (await client.post("/v1/embeddings", json={"input": given})).json()["error"]
        assert refused["message"] == f"{named}: 513 tokens are longer than the maximum length of 512 tokens"
        assert (refused["param"], refused["code"]) == ("input", "context_length_exceeded")
    assert (await client.post("/v1/embeddings", json={"input": [5] * 512})).status_code == 200
    refused = (await client.post("/v1/embeddings", json={"input": ["a", ""]})).json()["error"]
    assert (refused["message"], refused["param"]) == ("input[1]: must not be empty", "input")
