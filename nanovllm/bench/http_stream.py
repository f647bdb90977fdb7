"""A minimal client for HTTP/1.1 and server-sent events, with as little as possible between the socket and the clock.

Each request uses its own connection. Data is parsed in the callback that receives it, in pieces of any size: a piece
may end inside a chunk's length, a line or a character.
"""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from nanovllm.errors import ConfigError

MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 8 << 10  # of a chunk's length, or of a trailer line after the last chunk
MAX_ERROR_BYTES = 64 << 10  # kept of the body of an error response


class RequestFailed(Exception):
    """A request got no complete answer. Failures are counted by `kind`."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind


# --- sending ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """Where requests go."""

    host: str
    port: int
    authority: str  # host and port as the URL wrote them
    prefix: str  # precedes every path
    tls: ssl.SSLContext | None = None
    api_key: str | None = None

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.authority}",
            "Accept: application/json, text/event-stream",
            "Accept-Encoding: identity",
            "Connection: close",
            *([f"Authorization: Bearer {self.api_key}"] if self.api_key else []),
            *(["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def parse_server(url: str, api_key: str | None = None) -> Server:
    """Parse 'http://host:port'. A '/v1' at the end is removed, because the paths begin with it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"base_url={url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "@" in url:
        raise ConfigError(f"base_url={url!r}: write http://host:port or https://host:port, optionally with a path")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"base_url={url!r}: only visible ASCII characters can be in a URL")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("api_key: only visible ASCII characters can be sent")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Server(parts.hostname, port or (443 if tls else 80), parts.netloc, prefix, tls, api_key)


async def exchange(server: Server, message: bytes, on_body: Callable[[bytes], None]) -> None:
    """Send `message` and pass the body of a 200 response to `on_body` as it arrives. Raises RequestFailed."""
    loop = asyncio.get_running_loop()
    connection = _Connection(message, on_body)
    try:
        transport, _ = await loop.create_connection(lambda: connection, server.host, server.port, ssl=server.tls)
    except ConnectionRefusedError as error:
        raise RequestFailed("connection refused", str(error)) from None
    except OSError as error:
        raise RequestFailed("cannot connect", str(error)) from None
    except asyncio.CancelledError:
        connection.ended.cancel()  # its exception would never be retrieved
        raise
    try:
        await connection.ended
    finally:
        transport.abort()
    if connection.response.status != 200:
        raise RequestFailed(f"HTTP {connection.response.status}", error_text(bytes(connection.error_body)))


async def fetch(server: Server, path: str) -> bytes:
    """The body of a GET request."""
    body = bytearray()
    await exchange(server, server.message("GET", path), body.extend)
    return bytes(body)


class _Connection(asyncio.Protocol):
    def __init__(self, message: bytes, on_body: Callable[[bytes], None]) -> None:
        self.response = ResponseReader()
        self.error_body = bytearray()  # the body of any status but 200
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._message = message
        self._on_body = on_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            body = self.response.feed(data)
            if self.response.status == 200:
                self._on_body(body)
            elif len(self.error_body) < MAX_ERROR_BYTES:
                self.error_body += body
        except RequestFailed as failure:
            self.ended.set_exception(failure)
        else:
            if self.response.is_complete:
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if self.response.ends_with_connection and error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(
                RequestFailed("connection lost", str(error or "closed before the end of the response"))
            )


def error_text(body: bytes) -> str:
    """The message in an error body: OpenAI's message field if there is one, else the first line."""
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text.partition("\n")[0]


# --- reading ----------------------------------------------------------------------------------------------------------


class ResponseReader:
    """Parses a response in pieces; `feed` returns the part of the body that a piece contains."""

    def __init__(self) -> None:
        self.status = 0  # until the head has been read
        self.is_complete = False
        self.ends_with_connection = False  # the body has no length and ends when the connection is closed
        self._buffer = bytearray()
        self._body = bytearray()
        self._left = 0  # bytes missing of this chunk, or of the body
        self._is_chunked = False
        self._read = self._read_head  # reads the next element; returns False if more data is needed

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        while not self.is_complete and self._read():
            pass
        body, self._body = bytes(self._body), bytearray()
        return body

    def _read_head(self) -> bool:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return self._wait_for_more(MAX_HEAD_BYTES)
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
            raise RequestFailed("malformed response", f"{first[:80]!r} is not a status line")
        self._buffer = rest
        self.status = int(status[:3])
        if self.status >= 200:  # after a 1xx status another head follows
            self._choose_framing(dict(map(_header, lines)))
        return True

    def _choose_framing(self, headers: dict[str, str]) -> None:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._is_chunked, self._read = True, self._read_size
        elif "content-length" in headers:
            self._left = _number(headers["content-length"], base=10)
            self._read = self._read_counted
            self.is_complete = self._left == 0
        else:
            self.ends_with_connection, self._read = True, self._read_rest

    def _read_size(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        self._left = _number(line.partition(";")[0], base=16)
        self._read = self._read_counted if self._left else self._read_trailer
        return True

    def _read_counted(self) -> bool:
        piece = self._buffer[: self._left]
        del self._buffer[: self._left]
        self._body += piece
        self._left -= len(piece)
        if self._left == 0:
            self._read = self._read_chunk_end
            self.is_complete = not self._is_chunked
        return self._left == 0

    def _read_chunk_end(self) -> bool:
        line = self._take_line()
        if line:
            raise RequestFailed("malformed response", "a chunk is longer than its stated length")
        self._read = self._read_chunk_end if line is None else self._read_size
        return line is not None

    def _read_trailer(self) -> bool:
        line = self._take_line()
        self.is_complete = line == ""
        return line is not None

    def _read_rest(self) -> bool:
        self._body += self._buffer
        self._buffer.clear()
        return False

    def _take_line(self) -> str | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            self._wait_for_more(MAX_LINE_BYTES)
            return None
        line = self._buffer[:end].decode("latin-1")
        del self._buffer[: end + 2]
        return line

    def _wait_for_more(self, limit: int) -> bool:
        if len(self._buffer) > limit:
            raise RequestFailed("malformed response", f"no end of line in {limit} bytes")
        return False


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def _number(text: str, *, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise RequestFailed("malformed response", f"{text[:80]!r} is not a length")
    return number


class EventReader:
    """Parses server-sent events in pieces; `feed` returns the data of each complete event as bytes."""

    def __init__(self) -> None:
        self._rest = b""  # the incomplete line
        self._data: list[bytes] = []  # data lines of the incomplete event

    def feed(self, piece: bytes) -> list[bytes]:
        events = []
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
