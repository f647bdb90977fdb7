"""One HTTP connection: uvicorn's own, with cheaper chunks and a bound on how slowly a request may arrive."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(H11Protocol):
    """A client that leaves a request's headers unfinished, or goes on sending what nobody reads, is hung up on.

    The body of a request that is being answered has a time of its own, in `bodies`; between requests it is uvicorn's
    keep-alive that ends the connection.
    """

    def __init__(self, *args: Any, header_timeout: float, max_head_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = ChunkedSender(h11.SERVER, max_head_bytes)
        self._header_timeout = header_timeout
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_arrival()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch_arrival(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._stop_watching()
        elif self._patience is None:
            self._patience = self.loop.call_later(self._header_timeout, self._give_up)

    def _stop_watching(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            has_begun, _ = self.conn.trailing_data
            if has_begun and self.conn.our_state is h11.IDLE:  # else nothing was asked, or has been answered
                self.transport.write(TOO_SLOW)
            self.transport.close()


class ChunkedSender(h11.Connection):
    """Writes the chunks of a streamed body itself: h11 would look at each as if it could end the answer.

    What is no such chunk, h11 writes as ever. It alone decides whether a body is chunked.
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
