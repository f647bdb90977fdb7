"""Over real sockets: clients that disconnect, stall or send invalid data, and an engine that dies."""

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine

Serve = Callable[..., LiveServer]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that holds back its deltas until `release`."""
    made = FakeEngine("one two three four five")
    made.gate = asyncio.Event()
    return made


def release(server: LiveServer, engine: FakeEngine) -> None:
    server.do(engine.gate.set)


@contextmanager
def connected(server: LiveServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        yield connection


def post_bytes(body: dict[str, Any], path: str = CHAT) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def receive_object(connection: socket.socket) -> bytes:
    """Read a response whose body is a JSON object."""
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(4096)
    return received


def receive_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    received = b""
    while data := connection.recv(4096):
        received += data
    return received


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnecting_aborts_the_request(serve: Serve, engine: FakeEngine, path: str, stream: bool) -> None:
    server = serve(engine)
    engine.holds_after = 2
    body = {**HELLO, "prompt": "Hello", "input": "Hello", "max_tokens": 50, "stream": stream}
    if path == "/v1/responses":
        del body["prompt"], body["max_tokens"]
    with connected(server) as connection:
        connection.sendall(post_bytes(body, path))
        server.wait_until(lambda: bool(engine.open))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    server.wait_until(lambda: len(engine.aborted) == 1 and not engine.open)
    assert server.app.state.service.num_open_prompts == 0


def test_disconnecting_aborts_all_prompts_of_a_request(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine)
    with connected(server) as connection:
        connection.sendall(post_bytes({"prompt": ["a", "b", "c"]}, "/v1/completions"))
        server.wait_until(lambda: len(engine.open) == 3)
    server.wait_until(lambda: len(engine.aborted) == 3)


def test_a_half_sent_body_reaches_no_engine(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine)
    with connected(server) as connection:
        connection.sendall(post_bytes(HELLO)[:-5])
    with connected(server) as connection:  # the server continues
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert not engine.seen


def test_a_body_that_never_ends_times_out(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine, body_timeout=0.2)
    with connected(server) as connection:
        connection.sendall(post_bytes(HELLO)[:-5])
        received = receive_all(connection)
        assert received.startswith(b"HTTP/1.1 408") and b"body_timeout" in received


@pytest.mark.parametrize("before", [b"", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_headers_that_never_end_time_out(serve: Serve, engine: FakeEngine, before: bytes) -> None:
    """The header timeout applies to the first request of a connection and to later ones, even if bytes trickle in."""
    server = serve(engine, header_timeout=0.5)
    with connected(server) as connection:
        if before:
            connection.sendall(before)
            assert receive_object(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /version HTTP/1.1\r\n")
        connection.sendall(b"X-Slow: 1\r\n")
        assert receive_all(connection).startswith(b"HTTP/1.1 408")


def test_a_silent_client_is_disconnected(serve: Serve, engine: FakeEngine) -> None:
    with connected(serve(engine, header_timeout=0.2)) as connection:
        assert connection.recv(100) == b""


def test_a_body_that_nobody_reads_does_not_keep_the_connection(serve: Serve, engine: FakeEngine) -> None:
    with connected(serve(engine, header_timeout=0.2)) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert receive_object(connection).startswith(b"HTTP/1.1 404")
        connection.sendall(b"x")
        assert connection.recv(100) == b""


def test_a_slow_response_is_not_a_header_timeout(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine, header_timeout=0.2, body_timeout=0.2)
    with connected(server) as connection:
        connection.sendall(post_bytes(HELLO))
        connection.settimeout(0.6)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        release(server, engine)
        connection.settimeout(10)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_endless_headers_are_cut_off(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine)
    with connected(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nX-Long: " + b"x" * (80 << 10))
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_dead_engine_fails_all_requests(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine)
    engine.holds_after = 2
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        answers.append(httpx.post(server.url + CHAT, json={**HELLO, "stream": stream}, timeout=10))

    threads = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(6)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: len(engine.open) == 6)
    server.do(engine.death.set)
    for thread in threads:
        thread.join(10)
    assert len(answers) == 6
    for answer in answers:
        if answer.headers["content-type"].startswith("text/event-stream"):
            *_, error, done, end = answer.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            told = json.loads(error.removeprefix("data: "))
        else:
            assert answer.status_code == 503
            told = answer.json()
        assert told["error"]["code"] == "engine_dead" and "secret" not in answer.text


def test_a_full_queue_responds_with_429_at_once(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine, max_queued_requests=0)  # the engine itself accepts four
    waiting = [threading.Thread(target=httpx.post, args=(server.url + CHAT,), kwargs={"json": HELLO}) for _ in range(4)]
    for thread in waiting:
        thread.start()
    server.wait_until(lambda: len(engine.open) == 4)
    refused = httpx.post(server.url + CHAT, json=HELLO)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/ready").status_code == 429
    release(server, engine)
    for thread in waiting:
        thread.join(10)
    assert httpx.post(server.url + CHAT, json=HELLO).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_times_out(serve: Serve, engine: FakeEngine, stream: bool) -> None:
    server = serve(engine, request_timeout=0.3)
    engine.holds_after = 2
    answer = httpx.post(server.url + CHAT, json={**HELLO, "stream": stream}, timeout=10)
    assert answer.status_code == (200 if stream else 504)
    assert '"code":"timeout"' in answer.text
    assert len(engine.aborted) == 1


def test_a_slow_reader_stalls_only_itself(serve: Serve) -> None:
    engine = FakeEngine("word " * 20_000, max_model_len=200_000)
    server = serve(engine)
    with connected(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(post_bytes({**HELLO, "stream": True}))
        server.wait_until(lambda: len(engine.open) == 1)
        other = httpx.post(server.url + CHAT, json={**HELLO, "max_tokens": 5}, timeout=10)
        assert other.status_code == 200
        assert len(engine.open) == 1  # its deltas are held back; otherwise it would have finished by now
    server.wait_until(lambda: not engine.open)


def test_streams_begin_before_they_end(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine)
    engine.holds_after = 2
    with httpx.stream("POST", server.url + CHAT, json={**HELLO, "stream": True}, timeout=10) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        release(server, engine)
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_the_engine_view_streams_until_the_server_drains(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine)
    with httpx.stream("GET", server.url + "/engine/events", timeout=10) as response:
        lines = response.iter_lines()
        view = json.loads(next(lines).removeprefix("data: "))
        assert base64.b64decode(view["blocks"]) == bytes([0, 1, 2, 3]) and view["owners"] == [0, 0, 1, 1]
        assert view["stats"]["num_running"] == 1
        assert view["running"] == [["a", 3, 2, 5, 1]] and view["steps"] == [[0.5, 3, 1, 2.0]]
        server.do(server.app.state.service.drain)
        assert not any(lines)


def test_open_requests_finish_while_draining(serve: Serve, engine: FakeEngine) -> None:
    server = serve(engine)
    engine.holds_after = 1
    with httpx.stream("POST", server.url + CHAT, json={**HELLO, "stream": True}, timeout=10) as response:
        lines = response.iter_lines()
        next(lines)
        server.do(server.app.state.service.drain)
        assert httpx.post(server.url + CHAT, json=HELLO).status_code == 503
        release(server, engine)
        assert [line for line in lines if line][-1] == "data: [DONE]"
