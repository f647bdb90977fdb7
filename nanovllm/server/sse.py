"""Encode server-sent events. The part that all chunks of a stream share is encoded once."""

from collections.abc import Callable
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Encodes the chunks of an OpenAI stream. `head` has the fields that all chunks share.

    With `running_usage`, every chunk has the current usage; with `include_usage` alone, only the last one.
    """

    def __init__(
        self, head: dict[str, Any], *, include_usage: bool, running_usage: Callable[[], dict[str, Any]] | None
    ) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._running_usage = running_usage

    def chunk(self, choice: bytes, extra: bytes = b"") -> bytes:
        """A chunk with one choice. `extra` are further members of the chunk, each with a comma before it."""
        if self._running_usage is not None:
            return b'%b%b]%b,"usage":%b}\n\n' % (self._head, choice, extra, orjson.dumps(self._running_usage()))
        if extra:
            return b"%b%b]%b%b" % (self._head, choice, extra, self._tail[1:])
        return self._head + choice + self._tail

    def template(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        """The bytes of a chunk before and after the changing part of its choice; None if other parts change too."""
        if self._running_usage is not None:
            return None
        return self._head + before, after + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, which has the usage and no choices."""
        return b'%b],"usage":%b}\n\n' % (self._head, orjson.dumps(usage))


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """An event with a name, as in the Responses and Messages APIs."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
