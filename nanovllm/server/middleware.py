"""Middleware for all requests: request ids and API keys."""

import re
import secrets
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ApiError
from nanovllm.server.http import send_json

REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")  # ids accepted from clients; they are written to logs and headers
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready"})


class RequestIds:
    """Gives each request an id, from the client's X-Request-Id header if it is valid, and returns it in that header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["nanovllm.request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """Requires one of the keys, as a bearer token or in the x-api-key header.

    The paths in `open_paths` and below `open_folder` need no key. These are the web pages: they contain no data, and
    ask the user for the key that their API calls need.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Iterable[str], open_folder: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = OPEN_PATHS.union(open_paths)
        self._open_folder = open_folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]) or self._is_known(_sent_key(scope)):
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": 'Bearer realm="nanovllm"'}
        error = ApiError(401, "a valid API key is required", code="invalid_api_key", headers=headers)
        await send_json(send, error.status, error.body(), error.headers)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(self._open_folder)

    def _is_known(self, sent: bytes) -> bool:
        """Compare with every key in constant time, so that the time taken reveals nothing about the keys."""
        return any([secrets.compare_digest(sent, key) for key in self._keys])


def _sent_key(scope: Scope) -> bytes:
    scheme, _, credentials = header(scope, b"authorization").partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    return header(scope, b"x-api-key")


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
