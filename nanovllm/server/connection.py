"""uvicorn's HTTP connection with cheaper chunked encoding and a timeout for the headers of requests."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(H11Protocol):
    """Closes the connection of a client that does not complete a request's headers in time, or sends data nobody reads.

    The body of a request has a timeout of its own, in `bodies`. Between requests uvicorn's keep-alive timeout applies.
    """

    def __init__(self, *args: Any, header_timeout: float, max_head_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = ChunkedSender(h11.SERVER, max_head_bytes)
        self._header_timeout = header_timeout
        self._timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_timeout()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timeout()

    def _update_timeout(self) -> None:
        is_responding = self.cycle is not None and not self.cycle.response_complete
        if is_responding:
            self._cancel_timeout()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(self._header_timeout, self._on_timeout)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _on_timeout(self) -> None:
        if not self.transport.is_closing():
            received, _ = self.conn.trailing_data
            # A response is due only if a request has begun and has not been answered.
            if received and self.conn.our_state is h11.IDLE:
                self.transport.write(TIMEOUT_RESPONSE)
            self.transport.close()


class ChunkedSender(h11.Connection):
    """Encodes the chunks of a streamed body directly, because h11 runs its whole state machine for each chunk.

    h11 encodes everything else, and decides whether a body is chunked.
    """

    _is_chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self._is_chunked and type(event) is h11.Data:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        sent = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = sent is not None and b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        elif type(event) is h11.EndOfMessage:
            self._is_chunked = False
        return sent
