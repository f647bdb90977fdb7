"""The web pages: a chat at /, a view of the engine at /engine, and the stream of events for the latter."""

import asyncio
import base64
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from nanovllm.server.bodies import ClientDisconnected
from nanovllm.server.http import STREAM_HEADERS, while_connected
from nanovllm.server.service import Service

if TYPE_CHECKING:
    from nanovllm.remote.messages import EngineView

FOLDER = Path(__file__).parent / "static"
STATIC = "/static"
PAGES = {"/": "chat.html", "/engine": "engine.html"}
# The pages load nothing from other hosts, and pages of other hosts cannot embed them in a frame.
POLICY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes(service: Service) -> list[BaseRoute]:
    routes: list[BaseRoute] = [Route("/engine/events", EngineEvents(service), methods=["GET"])]
    if FOLDER.is_dir():
        routes += [Route(path, _page(FOLDER / file), methods=["GET"]) for path, file in PAGES.items()]
        routes.append(Mount(STATIC, StaticFiles(directory=FOLDER)))
    return routes


def _page(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        return FileResponse(file, headers=POLICY)

    return page


class EngineEvents:
    """Streams snapshots of the engine's state, several per second, until the client disconnects or the server stops."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        views = self._service.engine.view()
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            await while_connected(receive, self._send_until_drained(views, send))
        except ClientDisconnected:
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_until_drained(self, views: "AsyncGenerator[EngineView, None]", send: Send) -> None:
        sending = asyncio.ensure_future(_send_all(views, send))
        drained = asyncio.ensure_future(self._service.draining.wait())
        try:
            await asyncio.wait({sending, drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            drained.cancel()
            await asyncio.gather(sending, drained, return_exceptions=True)


async def _send_all(views: "AsyncGenerator[EngineView, None]", send: Send) -> None:
    async with aclosing(views):
        async for view in views:
            frame = b"data: %b\n\n" % orjson.dumps(as_json(view))
            await send({"type": "http.response.body", "body": frame, "more_body": True})


def as_json(view: "EngineView") -> dict[str, Any]:
    """A snapshot as JSON. `stats` is an object; requests and steps, of which there are many, are arrays."""
    return {
        "stats": {name: getattr(view.stats, name) for name in view.stats.__struct_fields__},
        "blocks": base64.b64encode(view.blocks).decode(),
        "owners": view.owners,
        "running": msgspec.to_builtins(view.running),
        "waiting": msgspec.to_builtins(view.waiting),
        "steps": msgspec.to_builtins(view.steps),
    }
