"""Read a request's body as a JSON object, with limits on size and time."""

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from nanovllm.server.errors import ApiError
from nanovllm.server.settings import ServerSettings

# The rest of the body is not read, so the connection cannot be reused.
CLOSE_CONNECTION = {"Connection": "close"}


class ClientDisconnected(Exception):
    """The client closed the connection; no response is needed."""


async def read_json(scope: Scope, receive: Receive, settings: ServerSettings) -> dict[str, Any]:
    """Read the body of an ASGI request as a JSON object, or raise an ApiError."""
    headers = dict(scope["headers"])
    _check_content_type(headers.get(b"content-type", b""))
    body = await _read(headers.get(b"content-length"), receive, settings)
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not valid UTF-8", code="invalid_utf8") from None
    except RecursionError:
        raise ApiError(400, "the body's JSON is nested too deeply", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _check_content_type(value: bytes) -> None:
    """Require JSON. A browser lets web pages of other hosts send other content types without a CORS preflight."""
    if value.split(b";")[0].strip().lower() != b"application/json":
        raise ApiError(415, "the body must be sent with the header 'Content-Type: application/json'")


async def _read(length: bytes | None, receive: Receive, settings: ServerSettings) -> bytes:
    limit = settings.max_body_bytes
    if length is not None and length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body += message.get("body", b"")
                if len(body) > limit:
                    raise _too_large(limit)
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        problem = f"the body did not arrive within {settings.body_timeout:g} seconds"
        raise ApiError(408, problem, code="body_timeout", headers=CLOSE_CONNECTION) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large", headers=CLOSE_CONNECTION)
