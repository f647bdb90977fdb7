"""The bytes of a response are those that h11 would write, for all kinds of requests; a connection that was lost."""

import asyncio
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from nanovllm.server.connection import ChunkedSender, Connection

REQUESTS = {
    "GET": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HEAD": b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an old client": b"GET / HTTP/1.0\r\n\r\n",
}


def written(connection: h11.Connection, request: bytes, headers: list[tuple[bytes, bytes]], num_answers: int) -> bytes:
    """All bytes of several responses over one connection."""
    sent = b""
    for _ in range(num_answers):
        connection.receive_data(request)
        while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
            pass
        parts = [b"ab", b"", b"c" * 300] if not request.startswith(b"HEAD") else [b""]
        events = [
            h11.Response(status_code=200, headers=headers),
            *(h11.Data(data=part) for part in parts),
            h11.EndOfMessage(),
        ]
        sent += b"".join(connection.send(event) or b"" for event in events)
        if connection.our_state is h11.DONE:
            connection.start_next_cycle()
    return sent


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("length", [None, b"302"])
def test_bytes_are_those_of_h11(name: str, length: bytes | None) -> None:
    headers = [] if length is None else [(b"content-length", length)]
    num_answers = 1 if name == "an old client" else 2
    ours, theirs = (
        written(kind(h11.SERVER), REQUESTS[name], headers, num_answers) for kind in (ChunkedSender, h11.Connection)
    )
    assert ours == theirs
    if name == "GET" and length is None:
        assert b"\r\n12c\r\nccc" in ours


def test_errors_are_those_of_h11() -> None:
    connection = ChunkedSender(h11.SERVER)
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"before there is a request"))


class LostTransport(asyncio.Transport):
    """As that of a TLS connection that was lost: it has no socket, and does not say that it is closed."""

    closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def test_a_lost_tls_connection_does_not_disturb_the_shutdown() -> None:
    async def shut_down() -> bool:
        config = uvicorn.Config(lambda scope: None, lifespan="off")
        config.load()
        connection = Connection(config, ServerState(), {}, header_timeout=5.0, max_head_bytes=1 << 16)
        transport = LostTransport()
        connection.connection_made(transport)
        connection.shutdown()
        connection.connection_lost(None)
        return transport.closed

    assert asyncio.run(shut_down())
