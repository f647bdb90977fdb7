"""uvicorn's HTTP connection with cheaper chunked encoding, a timeout for headers, and careful closing when idle."""

import asyncio
import contextlib
import select
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CLOSE_HEADER = (b"connection", b"close")
TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(H11Protocol):
    """Closes the connection of a client that does not complete a request's headers in time, or sends data nobody reads.

    The body of a request has a timeout of its own, in `bodies`. Between requests the keep-alive timeout applies. A
    request that has arrived but has not been read yet is answered before the connection is closed.
    """

    def __init__(self, *args: Any, header_timeout: float, max_head_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = ChunkedSender(h11.SERVER, max_head_bytes)
        self._header_timeout = header_timeout
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_shutting_down = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # cancels the keep-alive timer
        if self._is_responding:
            self._cancel_header_timer()
            if self._is_shutting_down:
                self._close_after_response()
        elif self._is_between_requests:  # the data was the rest of a request that had been answered already
            self._cancel_header_timer()
            self._start_keep_alive_timer()
        else:
            self._start_header_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # starts the keep-alive timer
        if self.conn.their_state is h11.SEND_BODY:  # the response did not need the body; its rest is still to come
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves the timer running if the client reset the connection
        self._cancel_header_timer()

    def shutdown(self) -> None:
        """Called when the server stops: close the connection, after the response if there is a request."""
        self._is_shutting_down = True
        if self._is_responding:
            self._close_after_response()
        elif not self._has_unread_data():
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Called when the keep-alive time has passed: close the connection, unless the next request has arrived."""
        if self.transport.is_closing():
            return
        if self._has_unread_data():
            self._start_keep_alive_timer()
            return
        if self.transport.can_write_eof():
            # `close` ends the connection only in the next iteration of the event loop. Until then a client could
            # still send a request, which would be lost.
            with contextlib.suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
        super().timeout_keep_alive_handler()

    def header_timeout_handler(self) -> None:
        """Called when the time for a request's headers has passed: answer 408 if they have begun, and close."""
        if self.transport.is_closing():
            return
        received, _ = self.conn.trailing_data
        if self._is_between_requests and self._has_unread_data():  # the first request has just arrived
            self._header_timer = None
            self._start_header_timer()
            return
        # A response is due only if a request has begun and has not been answered.
        if received and self.conn.our_state is h11.IDLE:
            self.transport.write(TIMEOUT_RESPONSE)
        self.transport.close()

    def _close_after_response(self) -> None:
        """Close the connection after this response. If it has not begun, its headers tell the client so."""
        self.cycle.keep_alive = False
        self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_between_requests(self) -> bool:
        received, _ = self.conn.trailing_data
        return self.conn.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE} and not received

    def _has_unread_data(self) -> bool:
        """Whether the socket has data, or its end, that the event loop has not read yet."""
        socket = self.transport.get_extra_info("socket")
        if socket is None:  # a TLS connection that was lost, which the event loop will report
            return False
        poll = select.poll()
        poll.register(socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _start_keep_alive_timer(self) -> None:
        handler = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def _start_header_timer(self) -> None:
        """Start the timer, unless it runs already: bytes that trickle in do not extend it."""
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout, self.header_timeout_handler)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


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
