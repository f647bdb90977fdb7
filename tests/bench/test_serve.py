"""The load client: right for any chunking of the bytes, counts failures and waiting."""

import asyncio
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import uvicorn

from nanovllm.bench.http_stream import (
    EventReader,
    RequestFailed,
    ResponseReader,
    Server,
    error_text,
    exchange,
    fetch,
    parse_server,
)
from nanovllm.bench.load import Answer, Outcome, Target, drive
from nanovllm.bench.serve_metrics import measure, peak_concurrency, summary
from nanovllm.bench.traces import (
    Request,
    random_requests,
    scheduled,
    text_of,
)
from nanovllm.errors import ConfigError

Script = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


# --- a scripted server ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Server]:
    """A server on a free port; `script` gets each request's body and writes the answer."""
    problems: list[BaseException] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:")), 0)
            body = await reader.readexactly(length)
            await script({"head": head, **(json.loads(body) if body else {})}, writer)
        except ConnectionError:
            pass  # the client has disconnected, as some tests want
        except Exception as error:
            problems.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield parse_server(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert not problems


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"


def refusal(status: str, message: str) -> bytes:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}}).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def stream(writer: asyncio.StreamWriter, *parts: bytes | float) -> None:
    """Write chunks, with pauses in seconds between them."""
    writer.write(STREAM)
    for part in parts:
        if isinstance(part, bytes):
            writer.write(chunk(part))
            await writer.drain()
        else:
            await asyncio.sleep(part)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def requests_of(count: int, output_len: int = 3) -> list[Request]:
    return random_requests(count=count, input_len=5, output_len=output_len, range_ratio=0, seed=0)


def run_against(script: Script, requests: list[Request], **options: Any) -> list[Outcome]:
    settings = {name: options.pop(name) for name in ("endpoint", "timeout", "as_text") if name in options}

    async def run() -> list[Outcome]:
        async with scripted(script) as server:
            return await drive(requests, Target(server, "tiny", **settings), **options)

    return asyncio.run(run())


# --- bytes ------------------------------------------------------------------------------------------------------------

SAID = ["Grüße", " 世界", " 🙂", "\nend"]
BODY = b": hello\n\n" + b"".join(map(token, SAID)) + b"data: a\r\ndata:b\r\n\r\n" + DONE


def cut(data: bytes, generator: random.Random) -> Iterator[bytes]:
    while data:
        size = generator.randint(1, 9)
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize("seed", range(30))
def test_any_cut_of_the_bytes_reads_the_same(seed: int) -> None:
    generator = random.Random(seed)
    chunks = b"".join(chunk(piece) for piece in cut(BODY, generator))
    response, events = ResponseReader(), EventReader()
    found: list[bytes] = []
    for piece in cut(b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM + chunks + b"0\r\nX-End: 1\r\n\r\n", generator):
        assert not response.is_complete
        found += events.feed(response.feed(piece))
    assert (response.status, response.is_complete) == (200, True)
    *tokens, joined, done = found
    assert [json.loads(data)["choices"][0]["text"] for data in tokens] == SAID
    assert (joined, done) == (b"a\nb", b"[DONE]")


def test_a_piece_of_a_chunk_is_not_held_back() -> None:
    response = ResponseReader()
    assert response.feed(STREAM + b"a\r\nfirst") == b"first"
    assert response.feed(b"67") == b"67"
    assert response.feed(b"890\r\n0;x=y\r\n\r\n") == b"890"
    assert response.is_complete


def test_a_body_with_a_length_and_one_without() -> None:
    response = ResponseReader()
    assert response.feed(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 3\r\n\r\nab") == b"ab"
    assert (response.status, response.is_complete) == (429, False)
    assert (response.feed(b"c"), response.is_complete) == (b"c", True)
    response = ResponseReader()
    assert response.feed(b"HTTP/1.0 200 OK\r\n\r\nab") == b"ab"
    assert (response.feed(b"c"), response.is_complete, response.ends_with_connection) == (b"c", False, True)
    response = ResponseReader()
    response.feed(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
    assert response.is_complete


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        STREAM + b"xyz\r\n",
        STREAM + b"-5\r\n",
        STREAM + b"2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"x" * 70_000,
        STREAM + b"1" * 10_000,
    ],
)
def test_what_is_no_http_is_told(data: bytes) -> None:
    with pytest.raises(RequestFailed, match="malformed response"):
        ResponseReader().feed(data)


def test_urls() -> None:
    server = parse_server("https://example.org/base/v1/", api_key="secret")
    assert (server.host, server.port, server.prefix, server.tls is not None) == ("example.org", 443, "/base", True)
    head = server.message("POST", "/v1/completions", b"{}").decode()
    assert head.startswith("POST /base/v1/completions HTTP/1.1\r\nHost: example.org\r\n")
    assert "\r\nAuthorization: Bearer secret\r\n" in head and head.endswith("Content-Length: 2\r\n\r\n{}")
    assert parse_server("http://[::1]:80").host == "::1"
    for url in (
        "ftp://x",
        "127.0.0.1:8000",
        "http://",
        "http://a:b@c",
        "http://a:99999",
        "http://a/b?c",
        "http://a/ b",
    ):
        with pytest.raises(ConfigError, match="base_url="):
            parse_server(url)
    with pytest.raises(ConfigError, match="api_key"):
        parse_server("http://a", api_key="one\r\nX: two")


def test_error_text() -> None:
    assert error_text(b'{"error": {"message": "too long"}}') == "too long"
    assert error_text(b'{"error": "plain"}') == "plain"
    assert error_text(b"<html>\nmore") == "<html>"
    assert error_text(b"\xff\xfe") == "\ufffd\ufffd"


# --- one answer -------------------------------------------------------------------------------------------------------


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def answer_of(*parts: bytes | float) -> Answer:
    """Bytes arrive at once; numbers are pauses in seconds."""
    clock = FakeClock()
    answer = Answer(clock)
    for part in parts:
        if isinstance(part, bytes):
            answer.feed(part)
        else:
            clock.now += part
    return answer


def test_times_are_of_pieces_that_show_something() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}])
    said = event(choices=[{"index": 0, "delta": {"content": "yes"}, "finish_reason": None}])
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    answer = answer_of(0.1, role, 0.2, thought, 0.05, said[:9], 0.05, said[9:], 1.0, end, usage(7, 5), DONE)
    assert list(answer.piece_times) == pytest.approx([100.3, 100.4])
    assert (answer.num_input_tokens, answer.num_output_tokens) == (7, 5)
    answer.check_complete()


def test_a_server_without_usage_has_its_pieces_counted() -> None:
    answer = answer_of(token("a"), token("b", "length"))
    answer.check_complete()
    assert answer.num_output_tokens == 2


def test_tokens_that_show_nothing_are_seen_at_their_end() -> None:
    answer = answer_of(1.0, token("", "length"), usage(3, 4))
    answer.check_complete()
    assert (list(answer.piece_times), answer.num_output_tokens) == ([101.0], 4)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (token("a"), "stream ended early"),
        (token("", "stop") + DONE, "empty answer"),
        (event(error={"message": "engine died", "type": "x", "param": None, "code": 500}), "error in the stream"),
        (token("a", "abort"), "error in the stream"),
        (b"data: {oops\n\n", "malformed response"),
        (b"data: [1]\n\n", "malformed response"),
        (b'data: {"choices": 3}\n\n', "malformed response"),
    ],
)
def test_answers_that_are_none(data: bytes, kind: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        answer_of(data).check_complete()
    assert failed.value.kind == kind


# --- against a socket -------------------------------------------------------------------------------------------------


def test_latencies_are_those_of_the_stream() -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await stream(writer, 0.2, token("a"), 0.1, token("b"), 0.1, token("c", "length"), usage(5, 3), 0.3, DONE)

    outcomes = run_against(script, requests_of(4))
    row = measure(outcomes)
    assert (row["completed"], row["failed"], row["total_input_tokens"], row["total_output_tokens"]) == (4, 0, 20, 12)
    assert (row["max_concurrent_requests"], row["shorter_than_asked"]) == (4, 0)
    # Allowance for a busy machine.
    assert 200 <= row["median_ttft_ms"] < 1000
    assert 90 <= row["median_tpot_ms"] < 500 and 90 <= row["median_itl_ms"] < 500
    assert 390 <= row["median_e2el_ms"] < 1500
    assert all(outcome.ended - outcome.piece_times[-1] > 0.2 for outcome in outcomes)  # this wait does not count
    assert row["duration"] >= 0.7


def test_what_is_sent() -> None:
    seen: list[dict[str, Any]] = []

    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        await stream(writer, token("a", "length"), usage(5, 1), DONE)

    request = Request(lambda: [1, 2, 3], 7)
    for options in ({}, {"as_text": True}, {"endpoint": "/v1/chat/completions"}):
        run_against(script, [request], **options)
    ids, words, chat = seen
    assert ids["head"].startswith("POST /v1/completions HTTP/1.1")
    del ids["head"]
    assert ids == {
        **{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 7, "temperature": 0.0, "ignore_eos": True},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }
    assert words["prompt"] == text_of([1, 2, 3]) and len(words["prompt"].split()) == 3
    assert chat["head"].startswith("POST /v1/chat/completions HTTP/1.1")
    assert chat["messages"] == [{"role": "user", "content": text_of([1, 2, 3])}] and "prompt" not in chat


def test_bytes_one_at_a_time() -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        whole = STREAM + chunk(token("世")) + chunk(token("🙂", "length") + usage(5, 2) + DONE) + b"0\r\n\r\n"
        for index in range(len(whole)):
            writer.write(whole[index : index + 1])
            await writer.drain()
            await asyncio.sleep(0)

    (outcome,) = run_against(script, requests_of(1, output_len=2))
    assert outcome.failure is None
    assert (len(outcome.piece_times), outcome.num_output_tokens) == (2, 2)


def test_failures_are_counted_by_kind() -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        kind = request["max_tokens"]
        if kind == 1:
            writer.write(refusal("500 Internal Server Error", "it broke"))
        elif kind == 2:
            writer.write(refusal("429 Too Many Requests", "later"))
        elif kind == 3:  # the connection drops inside the answer
            writer.write(STREAM + chunk(token("a")) + b"5\r\nda")
            await writer.drain()
        elif kind == 4:  # the HTTP stream ends properly, but the answer does not
            await stream(writer, token("a"))
        elif kind == 5:
            await stream(writer, token("a"), event(error={"message": "engine died"}))
        elif kind == 6:
            await stream(writer, token("a"), 60.0)
        else:
            await stream(writer, token("a", "length"), usage(5, kind), DONE)

    requests = [replace(request, output_len=1 + index % 8) for index, request in enumerate(requests_of(16))]
    outcomes = run_against(script, requests, timeout=1.0)
    row = measure(outcomes)
    assert (row["completed"], row["failed"], row["total_output_tokens"]) == (4, 12, 2 * (7 + 8))
    expected = [
        *("HTTP 500", "HTTP 429", "connection lost", "stream ended early", "error in the stream", "timed out"),
    ]
    assert row["failures"] == dict.fromkeys(expected, 2)
    assert row["failure_examples"]["HTTP 429"] == "HTTP 429: later"
    assert row["failure_examples"]["error in the stream"].endswith("engine died")
    text = summary(row)
    assert (
        "Failed requests:                         12\n" in text
        and "  HTTP 429:                              2\n" in text
    )
    assert "failed: HTTP 500: it broke" in text


def test_connection_refused() -> None:
    async def run() -> list[Outcome]:
        async with scripted(stream) as server:  # type: ignore[arg-type]
            pass
        return await drive(requests_of(3), Target(server, "tiny"))

    row = measure(asyncio.run(run()))
    assert (row["completed"], row["failures"]) == (0, {"connection refused": 3})
    assert row["mean_ttft_ms"] is None and "Mean TTFT (ms):                          -" in summary(row)


def test_closed_loop_keeps_its_limit() -> None:
    in_flight, most, order = 0, 0, []

    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        order.append(request["max_tokens"])
        await asyncio.sleep(0.02)
        in_flight -= 1  # before the answer ends, because the client may send the next request at once
        await stream(writer, token("a", "length"), usage(5, 1), DONE)

    requests = [replace(request, output_len=index + 1) for index, request in enumerate(requests_of(12))]
    ended: list[Outcome] = []
    outcomes = run_against(script, requests, max_concurrency=3, on_end=ended.append)
    assert (most, len(outcomes), len(ended)) == (3, 12, 12)
    assert peak_concurrency(outcomes) == 3
    assert sorted(order) == list(range(1, 13))
    # Requests waited before they were sent: in a closed loop that does not count as latency.
    assert all(outcome.begin == outcome.sent for outcome in outcomes)


def test_open_loop_counts_from_the_time_a_request_was_due() -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await stream(writer, 0.2, token("a", "length"), usage(5, 1), DONE)

    # All were due at the start and sent one after the other: the n-th waited n * 0.2 s.
    requests = scheduled(requests_of(4), [0.0, 0.0, 0.0, 0.0])
    outcomes = run_against(script, requests, max_concurrency=1)
    waits = sorted(outcome.first_token_seconds for outcome in outcomes)
    assert all(wait >= 0.2 * (index + 1) for index, wait in enumerate(waits))
    row = measure(outcomes)
    assert row["p99_send_delay_ms"] > 500 and row["max_concurrent_requests"] == 1


def test_open_loop_does_not_wait_for_answers() -> None:
    num_arrived = 0
    all_arrived = asyncio.Event()

    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal num_arrived
        num_arrived += 1
        if num_arrived == 4:
            all_arrived.set()
        await all_arrived.wait()  # no answer before the last request has arrived
        await stream(writer, token("a", "length"), usage(5, 1), DONE)

    outcomes = run_against(script, scheduled(requests_of(4), [0.0, 0.1, 0.2, 0.3]), timeout=30.0)
    assert [outcome.failure for outcome in outcomes] == [None] * 4
    assert peak_concurrency(outcomes) == 4
    assert np.diff([outcome.begin for outcome in outcomes]) == pytest.approx([0.1] * 3)
    assert all(outcome.sent >= outcome.begin - 0.002 for outcome in outcomes)  # never early


def test_fetch_and_exchange_read_plain_bodies() -> None:
    async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "GET /v1/models" in request["head"]:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1000)  # no length: the body ends with the connection
        else:
            writer.write(refusal("404 Not Found", "no such page"))

    async def run() -> bytes:
        async with scripted(script) as server:
            with pytest.raises(RequestFailed, match="HTTP 404: no such page"):
                await exchange(server, server.message("GET", "/other"), print)
            return await fetch(server, "/v1/models")

    assert asyncio.run(run()) == b"x" * 1000


@contextmanager
def uvicorn_server(app: Any) -> Iterator[Server]:
    listening = socket.create_server(("127.0.0.1", 0))  # so that an early connection waits instead of failing
    server = uvicorn.Server(uvicorn.Config(app, http="h11", log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield parse_server(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
    finally:
        server.should_exit = True
        thread.join()


def test_against_a_real_server() -> None:
    """Chunks as uvicorn frames them, with many concurrent requests."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        length = json.loads(message["body"])["max_tokens"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(length):
            finish = "length" if index == length - 1 else None
            await send({"type": "http.response.body", "body": token(" é", finish), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": usage(5, length) + DONE})

    requests = [replace(request, output_len=50 + index) for index, request in enumerate(requests_of(32))]
    with uvicorn_server(app) as server:
        outcomes = asyncio.run(drive(requests, Target(server, "tiny")))
    assert [outcome.failure for outcome in outcomes] == [None] * 32
    assert all(len(outcome.piece_times) == outcome.num_output_tokens for outcome in outcomes)
    assert sum(outcome.num_output_tokens for outcome in outcomes) == sum(range(50, 82))
