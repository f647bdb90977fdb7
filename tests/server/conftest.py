"""The app with a fake engine: called directly, or served on a local port for real clients."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from tokenizers import Tokenizer as Backend

from nanovllm.server.app import build_app
from nanovllm.server.connection import Connection
from nanovllm.server.lifecycle import web_config
from nanovllm.server.settings import ServerSettings
from nanovllm.text.tokenizer import Tokenizer
from tests.server.fake_engine import TOKENIZER, FakeEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def plain_tokenizer() -> Tokenizer:
    """The tests' tokenizer without the tokens and the template of tool calls and reasoning."""
    settings = json.loads((TOKENIZER / "tokenizer.json").read_text())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["special"]]
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    return Tokenizer(Backend.from_str(json.dumps(settings)), chat_template=template)


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(engine) as opened:
        yield opened


def open_client(engine: FakeEngine | None, **settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(engine, ServerSettings(**settings)), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


class LiveServer:
    """uvicorn in a thread, as `nanovllm serve` sets it up."""

    def __init__(self, engine: FakeEngine | None, settings: ServerSettings) -> None:
        self.app = build_app(engine, settings)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = web_config(self.app, settings)
        config.timeout_graceful_shutdown = 1
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    @property
    def connections(self) -> list[Connection]:
        return list(self._server.server_state.connections)

    def do(self, action: Callable[[], Any]) -> Any:
        """Run an action in the server's event loop."""

        async def act() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(10)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked in the server's event loop."""

        async def wait() -> None:
            async with asyncio.timeout(10):
                while not holds():
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(11)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def serve() -> Iterator[Callable[..., LiveServer]]:
    opened: list[LiveServer] = []

    def start(engine: FakeEngine | None, **settings: Any) -> LiveServer:
        server = LiveServer(engine, ServerSettings(**settings))
        opened.append(server)
        return server

    yield start
    for server in opened:
        server.close()
