"""From an ASGI call to an answer: read, work while the client is there, and tell what went wrong in the API's words."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.server.bodies import ClientGone, read_json
from nanovllm.server.calls import Call
from nanovllm.server.errors import ApiError, as_api_error, unavailable
from nanovllm.server.service import Service
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)

Frames = AsyncGenerator[bytes, None]  # server-sent events, each ready to be written
Handler = Callable[[Service, Call, dict[str, Any]], Awaitable[dict[str, Any] | Frames]]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy is not to collect events
]
GONE = 499  # nginx's number for a client that hung up; only the log sees it


@dataclass(frozen=True)
class Dialect:
    """How an API writes its errors."""

    body: Callable[[ApiError], dict[str, Any]]
    frame: Callable[[ApiError], bytes]  # in the middle of a stream


OPENAI = Dialect(body=ApiError.body, frame=lambda error: b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(error.body()))


class JsonPost:
    """An ASGI app for one path: a JSON object in, a JSON object or a stream of events out."""

    def __init__(self, service: Service, handler: Handler, dialect: Dialect = OPENAI) -> None:
        self._service = service
        self._handler = handler
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(path=scope["path"], request_id=scope["nanovllm.request_id"])
        answer = _Answer(send, self._dialect)
        try:
            self._service.check_room()
            request = await read_json(scope, receive, self._service.settings)
            await while_connected(receive, self._work(call, request, answer))
        except ClientGone:
            answer.status = GONE
        except asyncio.CancelledError:  # the server does not wait any longer
            await answer.fail(unavailable("the server is shutting down", code="draining"))
            raise
        except Exception as error:
            await answer.fail(as_api_error(error))
        if answer.status >= 400 and answer.status != GONE:
            self._service.metrics.failed.add(label=str(answer.status))
        logger.info(call.log_line(answer.status))

    async def _work(self, call: Call, request: dict[str, Any], answer: "_Answer") -> None:
        async with asyncio.timeout(self._service.settings.request_timeout):
            result = await self._handler(self._service, call, request)
            if isinstance(result, dict):
                await answer.send_json(200, result)
                return
            await answer.send_frames(result)


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work; if the client hangs up meanwhile, cancel it and raise ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Answer:
    """What has been sent so far: an error is a status before the first byte, and an event behind it."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self._streaming = False
        self.status = 0

    async def send_json(self, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        await send_json(self._send, status, value, headers)
        self.status = status

    async def send_frames(self, frames: Frames) -> None:
        """The status is told with the first frame: until then it may still be an error's."""
        send = self._send
        async with aclosing(frames):
            async for frame in frames:
                if not self._streaming:
                    self._streaming, self.status = True, 200
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        if self._streaming:
            await self._send({"type": "http.response.body", "body": self._dialect.frame(error), "more_body": False})
            self.status = error.status
        elif not self.status:
            await self.send_json(error.status, self._dialect.body(error), error.headers)


class JsonAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def send_json(
    send: Send, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    told = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    told += [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})
