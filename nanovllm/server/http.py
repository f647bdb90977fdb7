"""Handle POST requests: read the body, run the handler while the client is connected, send the response or an error."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.server.bodies import ClientDisconnected, read_json
from nanovllm.server.calls import Call
from nanovllm.server.errors import ApiError, as_api_error, unavailable
from nanovllm.server.service import Service
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)

EventStream = AsyncGenerator[bytes, None]  # encoded server-sent events; each item has one or more
Handler = Callable[[Service, Call, dict[str, Any]], Awaitable[dict[str, Any] | EventStream]]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer events
]
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected; used in the log only


@dataclass(frozen=True)
class ErrorFormat:
    """How an API encodes errors."""

    body: Callable[[ApiError], dict[str, Any]]  # the response body
    frame: Callable[[ApiError], bytes]  # the event in a stream that has begun


OPENAI_ERRORS = ErrorFormat(
    body=ApiError.body, frame=lambda error: b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(error.body())
)


class JsonPost:
    """An ASGI app for one path: the request is a JSON object, the response a JSON object or a stream of events."""

    def __init__(self, service: Service, handler: Handler, error_format: ErrorFormat = OPENAI_ERRORS) -> None:
        self._service = service
        self._handler = handler
        self._error_format = error_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(path=scope["path"], request_id=scope["nanovllm.request_id"])
        sender = _ResponseSender(send, self._error_format)
        try:
            self._service.check_capacity()
            request = await read_json(scope, receive, self._service.settings)
            await while_connected(receive, self._respond(call, request, sender))
        except ClientDisconnected:
            sender.status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # the shutdown timeout has passed
            await sender.fail(unavailable("the server is shutting down", code="draining"))
            raise
        except Exception as error:
            await sender.fail(as_api_error(error))
        if sender.status >= 400 and sender.status != CLIENT_CLOSED_REQUEST:
            self._service.metrics.failed.add(label=str(sender.status))
        logger.info(call.log_line(sender.status))

    async def _respond(self, call: Call, request: dict[str, Any], sender: "_ResponseSender") -> None:
        async with asyncio.timeout(self._service.settings.request_timeout):
            result = await self._handler(self._service, call, request)
            if isinstance(result, dict):
                await sender.send_json(200, result)
                return
            await sender.send_stream(result)


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`. If the client disconnects before it is done, cancel it and raise ClientDisconnected."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _ResponseSender:
    """Sends the response. An error is sent as a status before the first byte, and as an event after it."""

    def __init__(self, send: Send, error_format: ErrorFormat) -> None:
        self._send = send
        self._error_format = error_format
        self._streaming = False
        self.status = 0

    async def send_json(self, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        await send_json(self._send, status, value, headers)
        self.status = status

    async def send_stream(self, frames: EventStream) -> None:
        """Send a stream of events. The status is sent with the first one: until then an error can still set it."""
        send = self._send
        async with aclosing(frames):
            async for frame in frames:
                if not self._streaming:
                    self._streaming, self.status = True, 200
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Send an error, unless the response is complete."""
        if self._streaming:
            await self._send(
                {"type": "http.response.body", "body": self._error_format.frame(error), "more_body": False}
            )
            self.status = error.status
        elif not self.status:
            await self.send_json(error.status, self._error_format.body(error), error.headers)


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def send_json(
    send: Send, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    all_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    all_headers += [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
