"""Encode server-sent events. The part that all chunks of a stream share is encoded once."""

from collections.abc import Callable
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Encodes the chunks of an OpenAI stream. `head` has the fields that all chunks share.

    With `running_usage`, every chunk has the current usage; with `include_usage` alone, only the last one.
    As in vLLM, `fingerprint` is sent at the end of the stream only: with the usage, or with each finish reason.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        include_usage: bool,
        running_usage: Callable[[], dict[str, Any]] | None,
        fingerprint: str,
    ) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._running_usage = running_usage
        self._fingerprint = b',"system_fingerprint":' + orjson.dumps(fingerprint)
        self._fingerprint_with_reason = b"" if include_usage else self._fingerprint

    def chunk(self, choice: bytes, extra: bytes = b"", *, usage: dict[str, Any] | None = None) -> bytes:
        """A chunk with one choice. `extra` are further members of the chunk, each with a comma before it.

        `usage` replaces the current usage, where chunks have it.
        """
        if self._running_usage is not None:
            used = self._running_usage() if usage is None else usage
            return b'%b%b]%b,"usage":%b}\n\n' % (self._head, choice, extra, orjson.dumps(used))
        if extra:
            return b"%b%b]%b%b" % (self._head, choice, extra, self._tail[1:])
        return self._head + choice + self._tail

    def last_chunk(self, choice: bytes) -> bytes:
        """The chunk with the finish reason of a choice."""
        return self.chunk(choice, self._fingerprint_with_reason)

    def template(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        """The bytes of a chunk before and after the changing part of its choice; None if other parts change too."""
        if self._running_usage is not None:
            return None
        return self._head + before, after + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, which has the usage and no choices."""
        return b'%b]%b,"usage":%b}\n\n' % (self._head, self._fingerprint, orjson.dumps(usage))


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """An event with a name, as in the Responses and Messages APIs."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
