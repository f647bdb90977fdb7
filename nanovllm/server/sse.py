"""Server-sent events as bytes: what all chunks of a stream share is written once."""

from collections.abc import Callable
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """OpenAI's chunks: one event for each piece of a choice, then perhaps one with the usage."""

    def __init__(
        self, head: dict[str, Any], *, include_usage: bool, running_usage: Callable[[], dict[str, Any]] | None
    ) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._running_usage = running_usage  # where every chunk is to tell it

    def chunk(self, choice: bytes, extra: bytes = b"") -> bytes:
        """One choice's news; `extra` are further members of the chunk, each with a comma before it."""
        if self._running_usage is not None:
            return b'%b%b]%b,"usage":%b}\n\n' % (self._head, choice, extra, orjson.dumps(self._running_usage()))
        if extra:
            return b"%b%b]%b%b" % (self._head, choice, extra, self._tail[1:])
        return self._head + choice + self._tail

    def template(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        """What stands around the part of a choice that changes; None where more than that changes."""
        if self._running_usage is not None:
            return None
        return self._head + before, after + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._head, orjson.dumps(usage))


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """An event with its kind in front, as the Responses and Messages APIs write it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
