"""The load client: right for any chunking of the bytes, counts failures and waiting, repeatable by its seed."""

import asyncio
import json
import math
import random
import socket
import threading
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
from nanovllm.bench.plot import draw, round_up
from nanovllm.bench.serve_metrics import ServeReport, is_good, measure, peak_concurrency, summary
from nanovllm.bench.traces import (
    Request,
    arrivals,
    file_requests,
    published_requests,
    random_requests,
    scheduled,
    text_of,
    trace_requests,
)
from nanovllm.bench.workload import make_workload
from nanovllm.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"
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


# --- numbers ----------------------------------------------------------------------------------------------------------


def outcome_of(begin: float, *pieces: float, tokens: int | None = None, sent: float | None = None) -> Outcome:
    return Outcome(
        begin=begin,
        sent=begin if sent is None else sent,
        ended=pieces[-1],
        piece_times=array("d", pieces),
        num_input_tokens=10,
        num_output_tokens=len(pieces) if tokens is None else tokens,
        wanted_output_tokens=3,
    )


def failed_outcome(begin: float, ended: float) -> Outcome:
    return replace(outcome_of(begin, ended, tokens=0), failure=RequestFailed("HTTP 429", "busy"))


def test_metrics_by_hand() -> None:
    outcomes = [
        outcome_of(0.0, 0.1, 0.2, 0.4),
        outcome_of(0.5, 0.8, 1.3, tokens=6),  # two pieces, but six tokens
        outcome_of(1.0, 2.0, sent=1.5),
        failed_outcome(0.2, 0.3),
    ]
    row = measure(outcomes, {"ttft": 300.5, "tpot": 120.0})
    expected = {
        **{"completed": 3, "failed": 1, "failures": {"HTTP 429": 1}, "duration": 2.0},
        **{"total_input_tokens": 30, "total_output_tokens": 10, "request_throughput": 1.5},
        **{"output_throughput": 5.0, "total_token_throughput": 20.0, "max_concurrent_requests": 2},
        **{"shorter_than_asked": 1, "request_goodput": 0.5},
        **{"mean_ttft_ms": 1400 / 3, "median_ttft_ms": 300.0, "p99_ttft_ms": 300 + 0.98 * 700},
        **{"mean_tpot_ms": 125.0, "median_tpot_ms": 125.0},
        **{"mean_itl_ms": 800 / 3, "median_itl_ms": 200.0},
        **{"mean_e2el_ms": 2200 / 3, "median_e2el_ms": 800.0},
    }
    for name, value in expected.items():
        assert row[name] == (value if isinstance(value, dict) else pytest.approx(value)), name
    assert row["request_goodput"] == pytest.approx(0.5)


def test_goodput_takes_every_limit() -> None:
    outcome = outcome_of(0.0, 0.1, 0.2, 0.3)
    assert is_good(outcome, {"ttft": 101, "tpot": 101, "e2el": 301})
    assert not is_good(outcome, {"ttft": 99})
    assert not is_good(outcome, {"ttft": 101, "e2el": 299})
    assert is_good(outcome_of(0.0, 0.1), {"tpot": 1})  # there is no second token


def test_peak_concurrency() -> None:
    assert peak_concurrency([outcome_of(0, 1), outcome_of(1, 2), outcome_of(2, 3)]) == 1
    assert peak_concurrency([outcome_of(0, 3), outcome_of(1, 2), outcome_of(1.5, 4), outcome_of(3.5, 5)]) == 3


def test_report_has_vllms_names() -> None:
    report = ServeReport("serve", {"model": "tiny"}, {"requests": 1}, [measure([outcome_of(0.0, 0.1, 0.25)])])
    text = str(report)
    assert text.startswith(
        "serve\n\nmodel     tiny\nrequests  1\n\n============ Serving Benchmark Result ============\n"
    )
    for line in (
        *("Successful requests:                     1", "Benchmark duration (s):                  0.25"),
        *("Total input tokens:                      10", "Total generated tokens:                  2"),
        *("Request throughput (req/s):              4.00", "Output token throughput (tok/s):         8.00"),
        *("Total Token throughput (tok/s):          48.00", "Peak concurrent requests:                1"),
        *("Mean TTFT (ms):                          100.00", "Median TPOT (ms):                        150.00"),
        *("P99 ITL (ms):                            150.00", "P99 E2EL (ms):                           250.00"),
        *("---------------Time to First Token----------------", "-----Time per Output Token (excl. 1st token)------"),
    ):
        assert line in text.splitlines(), line
    document = json.loads(report.to_json())
    assert (document["benchmark"], document["results"][0]["mean_ttft_ms"]) == ("serve", pytest.approx(100))


# --- requests and arrival times ---------------------------------------------------------------------------------------


def test_arrivals_follow_their_seed() -> None:
    times = arrivals(5000, rate=20.0, burstiness=1.0, seed=3)
    assert times == arrivals(5000, rate=20.0, burstiness=1.0, seed=3)
    assert times != arrivals(5000, rate=20.0, burstiness=1.0, seed=4)
    assert times[0] == 0 and times == sorted(times)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.05)  # as in an exponential distribution


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = np.diff(arrivals(20_000, rate=5.0, burstiness=burstiness, seed=0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_random_requests() -> None:
    options = {"count": 200, "input_len": 100, "output_len": 10, "range_ratio": 0.2, "vocab_size": 50}
    found = random_requests(**options, seed=1)
    prompts = [request.make_prompt() for request in found]
    assert prompts == [request.make_prompt() for request in random_requests(**options, seed=1)]
    assert prompts != [request.make_prompt() for request in random_requests(**options, seed=2)]
    assert (min(map(len, prompts)), max(map(len, prompts))) == (80, 120)
    assert {request.output_len for request in found} == {8, 9, 10, 11, 12}
    assert {token for prompt in prompts for token in prompt} == set(range(50))
    exact = random_requests(count=3, input_len=7, output_len=2, range_ratio=0, seed=0)
    assert [(len(request.make_prompt()), request.output_len, request.due) for request in exact] == [(7, 2, None)] * 3


def test_published_requests_are_the_published_workload() -> None:
    found, workload = published_requests(count=256, seed=0), make_workload()
    assert [request.make_prompt() for request in found] == workload.prompts
    assert [request.output_len for request in found] == workload.output_lens


def test_requests_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Grüße"}\n\n{"prompt": [1, 2], "output_tokens": 5}\n', encoding="utf-8")
    found = file_requests(file, output_len=9)
    assert [(request.make_prompt(), request.output_len) for request in found] == [("Grüße", 9), ([1, 2], 5)]
    assert len(file_requests(file, output_len=9, count=1)) == 1
    with pytest.raises(ConfigError, match="line 3: token ids go to /v1/completions only"):
        file_requests(file, output_len=9, is_chat=True)
    messages = [{"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"messages": messages}))
    assert file_requests(file, output_len=9, is_chat=True)[0].make_prompt() == messages
    with pytest.raises(ConfigError, match="messages to /v1/chat/completions only"):
        file_requests(file, output_len=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no request"),
        ("{", "line 1: "),
        ("[1]", "line 1: not a JSON object"),
        ('{"prompt": ""}', "line 1: needs"),
        ('{"prompt": [1, "a"]}', "line 1: needs"),
        ('{"text": "a"}', "line 1: needs"),
        ('{"prompt": "a"}\n{"prompt": "a", "output_tokens": 0}', "line 2: output_tokens=0 must be"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        file_requests(file, output_len=1)


AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
2023-11-16 18:17:04.2299600,110,27
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 27482, "input_length": 1536, "output_length": 26, "hash_ids": [46, 47, 2366]}
{"timestamp": 30535, "input_length": 700, "output_length": 7, "hash_ids": [9]}
"""


def test_azure_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    found = trace_requests(file, speedup=2.0, seed=5, vocab_size=100)
    assert [request.due for request in found] == pytest.approx([0.0, 0.125, 0.25], abs=1e-5)
    assert [(len(request.make_prompt()), request.output_len) for request in found] == [(4808, 10), (110, 27), (3180, 8)]
    assert found[0].make_prompt() == trace_requests(file, seed=5, vocab_size=100)[0].make_prompt()
    assert found[0].make_prompt()[:100] != found[2].make_prompt()[:100]
    assert [request.due for request in trace_requests(file, speedup=math.inf, limit=2)] == [None, None]


def test_mooncake_trace_shares_what_its_hashes_share(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    first, second, third = trace_requests(file)
    assert [request.due for request in (first, second, third)] == [0.0, 27.482, 30.535]
    one, two, three = (request.make_prompt() for request in (first, second, third))
    assert (len(one), len(two), len(three)) == (1100, 1536, 700)
    assert one[:1024] == two[:1024] and one[1024:1100] != two[1024:1100]
    assert three[:512] not in (one[:512], one[512:1024])
    assert first.make_prompt() == one
    assert trace_requests(file, seed=1)[0].make_prompt() != one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "contains no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: TIMESTAMP='noon'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,1\n", "line 2: ContextTokens='0'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n", "line 2: GeneratedTokens=None"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "line 1: timestamp='x'"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 1: timestamp=nan"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 1: input_length=1.5"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "line 1: hash_ids"),
    ],
)
def test_traces_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        trace_requests(file)


# --- the plot ---------------------------------------------------------------------------------------------------------


def test_plot_is_a_picture_of_every_request() -> None:
    outcomes = [outcome_of(i * 0.1, i * 0.1 + 0.2, i * 0.1 + 0.3 + 0.01 * i) for i in range(50)]
    outcomes.append(failed_outcome(2.0, 2.5))
    picture = draw(outcomes, 'a <model> & "more"')
    root = ElementTree.fromstring(picture)
    paths = [path.attrib["d"] for path in root.iter(f"{SVG}path")]
    assert [path.count("M") for path in paths] == [50, 1, 50, 1, 50, 1]  # dots, and the failure, three times
    assert len(list(root.iter(f"{SVG}polyline"))) == 3
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert 'a <model> & "more"' in texts and "red: failed requests, 1" in texts
    assert any(text and text.startswith("p99 200 ms") for text in texts)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter(f"{SVG}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))  # a CDF never decreases


def test_plot_of_single_tokens_and_of_one_moment() -> None:
    root = ElementTree.fromstring(draw([outcome_of(5.0, 5.1), outcome_of(5.0, 5.2)], "one"))
    assert len(list(root.iter(f"{SVG}polyline"))) == 2  # nothing to draw for the time per output token


@pytest.mark.parametrize(
    ("value", "end"), [(0, 1), (1, 1), (1.01, 1.2), (3.5, 4), (97, 100), (0.0042, 0.005), (850, 1000)]
)
def test_axes_end_at_round_numbers(value: float, end: float) -> None:
    assert round_up(value) == pytest.approx(end)
