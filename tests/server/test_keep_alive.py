"""No request is lost: pooled clients that pause, requests that arrive while a connection is closed, and bursts."""

import asyncio
import random
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from nanovllm.server.settings import ServerSettings
from nanovllm.utils.open_files import allow_many_open_files
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine
from tests.server.test_live import connected, post_bytes, receive_all

Serve = Callable[..., LiveServer]
COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": "Hello", "max_tokens": 20}
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
POOLS = {"aiohttp": 15, "Go and Rust's reqwest": 90, "Chrome and OkHttp": 300, "Google's load balancer": 600}  # seconds


def receive_object(connection: socket.socket) -> bytes:
    """Read a response whose body is a JSON object."""
    received = b""
    while not received.endswith(b"}"):
        data = connection.recv(4096)
        assert data, f"the connection was closed after {received!r}"
        received += data
    return received


def test_idle_connections_stay_open_longer_than_in_the_pools_of_clients() -> None:
    assert ServerSettings().keep_alive_timeout > max(POOLS.values())


# --- pooled clients ---------------------------------------------------------------------------------------------------


class Pooled:
    """Clients with one pooled connection each, which pause after every request. Counts requests without an answer."""

    def __init__(self, server: LiveServer, *, pool_seconds: float, pauses: tuple[float, ...]) -> None:
        self._url = server.url
        self._pool_seconds = pool_seconds
        self._pauses = pauses
        self.num_answered = 0
        self.num_connections = 0
        self.lost: list[str] = []

    def run(self, *, num_clients: int) -> None:
        """Let every client send one request per pause, with the pauses in random order."""

        async def run_all() -> None:
            async with asyncio.TaskGroup() as group:
                for seed in range(num_clients):
                    group.create_task(self._run_client(random.Random(seed)))

        asyncio.run(run_all())

    async def _run_client(self, rng: random.Random) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._count_connection)
        pool = aiohttp.TCPConnector(limit=1, keepalive_timeout=self._pool_seconds)
        async with aiohttp.ClientSession(self._url, connector=pool, trace_configs=[trace]) as session:
            for pause in rng.sample(self._pauses, len(self._pauses)):
                try:
                    await self._send(session, rng)
                    self.num_answered += 1
                except aiohttp.ClientError as error:
                    self.lost.append(repr(error))
                await asyncio.sleep(max(0.0, pause + rng.uniform(-0.05, 0.05)))

    async def _send(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        kind = rng.choice(["stream", "object", "get", "unknown path"])
        if kind == "get":
            async with session.get("/version") as response:
                assert response.status == 200 and await response.json()
        elif kind == "unknown path":  # answered before the body is read
            async with session.post("/nowhere", data=b"x" * 100_000) as response:
                assert response.status == 404 and await response.json()
        else:
            async with session.post(COMPLETIONS, json={**PROMPT, "stream": kind == "stream"}) as response:
                body = await response.read()
                assert response.status == 200 and body.endswith(b"[DONE]\n\n" if kind == "stream" else b"}")

    async def _count_connection(self, *_: object) -> None:
        self.num_connections += 1


def test_clients_that_pause_around_every_timeout_lose_no_request(serve: Serve) -> None:
    """The timeouts of the server, and the time after which the clients themselves drop a connection.

    The clients run in the server's process: its timeouts are longer than a busy machine may hold the process up.
    """
    keep_alive, header, pool = 6.0, 5.0, 0.25
    server = serve(FakeEngine("one two"), keep_alive_timeout=keep_alive, header_timeout=header)
    clients = Pooled(server, pool_seconds=pool, pauses=(*13 * [0.0], *5 * [pool], header, keep_alive))
    clients.run(num_clients=100)
    assert clients.lost == [] and clients.num_answered == 2000
    assert 100 < clients.num_connections < 1500  # some connections expired, others were used again


def test_clients_that_disconnect_inside_a_stream_disturb_no_others(serve: Serve) -> None:
    class SlowEngine(FakeEngine):
        async def _pass_gate(self, number: int) -> None:
            await asyncio.sleep(0.001)

    engine = SlowEngine("one two three four five six seven eight nine ten " * 10, max_num_seqs=1000)
    server = serve(engine)
    num_complete = 0

    async def run_client(session: aiohttp.ClientSession, rng: random.Random) -> None:
        nonlocal num_complete
        for _ in range(20):
            leaves = rng.random() < 0.4
            async with session.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 40, "stream": True}) as response:
                assert response.status == 200
                if leaves:
                    await response.content.readany()
                    response.close()  # closes the connection, too
                else:
                    assert (await response.read()).endswith(b"data: [DONE]\n\n")
                    num_complete += 1

    async def run_all() -> None:
        async with aiohttp.ClientSession(server.url) as session, asyncio.TaskGroup() as group:
            for seed in range(20):
                group.create_task(run_client(session, random.Random(seed)))

    asyncio.run(run_all())
    assert num_complete > 200 and engine.aborted
    server.wait_until(lambda: not engine.open)
    assert server.app.state.service.num_open_prompts == 0


# --- closing ----------------------------------------------------------------------------------------------------------


def test_an_idle_connection_is_closed(serve: Serve) -> None:
    with connected(serve(FakeEngine(), keep_alive_timeout=0.2)) as connection:
        connection.sendall(GET)
        assert receive_object(connection).startswith(b"HTTP/1.1 200")
        assert connection.recv(100) == b""


@pytest.mark.parametrize("timer", ["header_timeout_handler", "timeout_keep_alive_handler"])
def test_a_request_that_arrives_when_a_timer_ends_is_answered(serve: Serve, timer: str) -> None:
    """The event loop calls the timer before it has read the request."""
    server = serve(FakeEngine())
    with connected(server) as connection:
        if timer == "timeout_keep_alive_handler":
            connection.sendall(GET)
            receive_object(connection)
        server.wait_until(lambda: bool(server.connections))
        (served,) = server.connections
        for _ in range(2):

            def send_and_time_out() -> None:
                connection.sendall(GET)
                getattr(served, timer)()

            server.do(send_and_time_out)
            assert receive_object(connection).startswith(b"HTTP/1.1 200")
        server.do(served.timeout_keep_alive_handler)
        assert connection.recv(100) == b""


def test_connections_with_tls(serve: Serve, tmp_path: Path) -> None:
    """A request that has arrived is answered, and then the connection is closed."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make_certificate(certificate, key)
    server = serve(FakeEngine(), ssl_certfile=str(certificate), ssl_keyfile=str(key))
    context = ssl.create_default_context(cafile=str(certificate))
    with connected(server) as plain, context.wrap_socket(plain, server_hostname="localhost") as connection:
        connection.sendall(GET)
        assert receive_object(connection).startswith(b"HTTP/1.1 200")
        (served,) = server.connections

        def send_and_time_out() -> None:
            connection.sendall(GET)
            served.timeout_keep_alive_handler()

        server.do(send_and_time_out)
        assert receive_object(connection).startswith(b"HTTP/1.1 200")
        server.do(served.timeout_keep_alive_handler)
        assert connection.recv(100) == b""


def make_certificate(certificate: Path, key: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, which makes the certificate")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)


def test_the_late_rest_of_an_answered_request_does_not_shorten_the_keep_alive_time(serve: Serve) -> None:
    with connected(serve(FakeEngine(), header_timeout=0.2)) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        assert receive_object(connection).startswith(b"HTTP/1.1 404")
        connection.sendall(b"late")
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        connection.sendall(GET)
        assert receive_object(connection).startswith(b"HTTP/1.1 200")


def test_a_client_that_never_sends_the_rest_is_disconnected(serve: Serve) -> None:
    with connected(serve(FakeEngine(), header_timeout=0.2)) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        assert receive_object(connection).startswith(b"HTTP/1.1 404")
        assert connection.recv(100) == b""


def test_a_reset_connection_leaves_no_timer(serve: Serve) -> None:
    server = serve(FakeEngine())
    with connected(server) as connection:
        connection.sendall(GET)
        receive_object(connection)
        (served,) = server.connections
        server.wait_until(lambda: served.timeout_keep_alive_task is not None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
    server.wait_until(lambda: not server.connections)
    assert served.timeout_keep_alive_task is None


def test_a_request_that_arrives_at_shutdown_is_answered(serve: Serve) -> None:
    server = serve(FakeEngine())
    with connected(server) as connection, connected(server) as idle:
        for client in (connection, idle):
            client.sendall(GET)
            receive_object(client)

        def shut_down() -> None:
            connection.sendall(GET)
            for served in server.connections:
                served.shutdown()

        server.do(shut_down)
        response = receive_object(connection)
        assert response.startswith(b"HTTP/1.1 200") and b"\r\nconnection: close\r\n" in response.lower()
        assert connection.recv(100) == idle.recv(100) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_responses_at_shutdown_tell_the_client_to_close_its_connection(serve: Serve, stream: bool) -> None:
    """A client that puts the connection back into its pool would lose its next request."""
    engine = FakeEngine("one two")
    engine.gate = asyncio.Event()
    server = serve(engine)
    with connected(server) as connection:
        connection.sendall(post_bytes({**PROMPT, "stream": stream}, COMPLETIONS))
        server.wait_until(lambda: bool(engine.open))
        server.do(lambda: [served.shutdown() for served in server.connections])
        server.do(engine.gate.set)
        received = receive_all(connection)
        assert received.startswith(b"HTTP/1.1 200") and received.lower().count(b"\r\nconnection: close\r\n") == 1
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


# --- bursts -----------------------------------------------------------------------------------------------------------


def test_a_thousand_connections_at_once(serve: Serve) -> None:
    """All are made while the server is too busy to accept one, and all get an answer."""
    allow_many_open_files()
    longest_queue = int(Path("/proc/sys/net/core/somaxconn").read_text())
    server = serve(FakeEngine(), header_timeout=60.0)
    connections: list[socket.socket] = []

    def connect() -> None:
        for _ in range(min(1000, longest_queue)):
            connections.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            connections[-1].sendall(GET)

    try:
        server.do(connect)
        assert all(receive_object(connection).startswith(b"HTTP/1.1 200") for connection in connections)
    finally:
        for connection in connections:
            connection.close()


def test_the_limit_of_open_files_is_raised_and_never_lowered() -> None:
    code = """
import resource
from nanovllm.utils.open_files import MAX_OPEN_FILES, allow_many_open_files
_, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
for limit in (256, highest):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, highest))
    allow_many_open_files()
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found == (max(limit, min(MAX_OPEN_FILES, highest)), highest), (limit, found)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
