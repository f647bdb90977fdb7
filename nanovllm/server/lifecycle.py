"""Run the server: listen, load the model meanwhile, and shut down gracefully on SIGTERM or Ctrl-C."""

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
from starlette.applications import Starlette

from nanovllm.errors import ConfigError
from nanovllm.server.app import build_app
from nanovllm.server.connection import Connection
from nanovllm.server.engine import Engine
from nanovllm.server.settings import ServerSettings
from nanovllm.utils.logging import get_logger
from nanovllm.utils.short_pauses import short_pauses

logger = get_logger(__name__)

TICK_SECONDS = 1.0  # how often the Date header is updated; an idle server wakes up for nothing else
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(settings: ServerSettings) -> socket.socket:
    """Bind the port, or raise a ConfigError with the reason."""
    try:
        addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        host, port, reason = settings.host, settings.port, error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port (0 = any free port)"
        ) from None
    return listener


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if settings.ssl_certfile is None else 'https'}://{shown}:{port}"


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, and without waking up ten times a second when idle."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop_requested = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self._stop_requested.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stop_requested.wait()

    def stop(self) -> None:
        """Accept no more connections and let open requests finish. A second call does not wait for them."""
        self.force_exit = self._stop_requested.is_set()
        self.should_exit = True
        self._stop_requested.set()


def web_config(app: Starlette, settings: ServerSettings) -> uvicorn.Config:
    """The uvicorn settings. h11 parses requests, because it limits the size of their headers."""
    connection = partial(
        Connection,
        header_timeout=settings.header_timeout,
        max_head_bytes=settings.h11_max_incomplete_event_size,
    )
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], connection),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]  # only the annotation wants an int
        timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout)),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"ssl_certfile or ssl_keyfile cannot be used: {error.strerror or error}") from None
    return config


async def serve(listener: socket.socket, settings: ServerSettings, load: Callable[[], Awaitable[Engine]]) -> None:
    """Serve until SIGTERM or Ctrl-C. Requests get status 503 until `load` returns; if it raises, the server ends."""
    app = build_app(None, settings)
    service = app.state.service
    server = Server(web_config(app, settings))

    def stop() -> None:
        logger.info("shutting down: %d prompts are still open", service.num_open_prompts)
        service.drain()
        server.stop()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    loading = asyncio.ensure_future(load())
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            service.attach(loading.result())
            with short_pauses():
                await serving
    finally:
        service.drain()
        server.stop()
        await serving
        await _close(loading)
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _close(loading: "asyncio.Future[Engine]") -> None:
    """Cancel loading, or close the engine if it was loaded."""
    loading.cancel()
    await asyncio.wait([loading])
    if not loading.cancelled() and loading.exception() is None:
        await loading.result().close()
