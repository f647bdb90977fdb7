"""Read the calls of Mistral's models, which follow the tag [TOOL_CALLS].

Older models write one list, [{"name": NAME, "arguments": {...}}, ...]. Newer ones write NAME[ARGS]{...}, some without
the tag [ARGS] or with an id, [CALL_ID]ID, before it, and another [TOOL_CALLS] before the next call.
"""

from __future__ import annotations

import re
import secrets
import string

from nanovllm.server.parsers.call_format import JsonCall, NamedCall, Tools
from nanovllm.server.parsers.json_object import ObjectScanner, Status
from nanovllm.server.parsers.text import is_partial_tag, skip_blanks

CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"

_NAME = re.compile(r"[a-zA-Z0-9_-]+")


def new_short_id() -> str:
    """An id of nine letters and digits: Mistral's chat templates refuse messages whose calls have other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralCalls:
    """Scans one call by name, or a list of calls, that begins at `start`."""

    def __init__(self, start: int, tools: Tools | None) -> None:
        self._start, self._tools = start, tools
        self._scanner: JsonCallList | NamedArguments | None = None

    @property
    def end(self) -> int:
        return self._start if self._scanner is None else self._scanner.end

    @property
    def calls(self) -> list[NamedCall]:
        return [] if self._scanner is None else self._scanner.calls

    def scan(self, text: str) -> Status:
        if self._scanner is None:
            kind = JsonCallList if text.startswith("[", self._start) else NamedArguments
            self._scanner = kind(self._start, self._tools)
        return self._scanner.scan(text)


class JsonCallList:
    """Scans a JSON list of calls."""

    def __init__(self, start: int, tools: Tools | None) -> None:
        self.end = start
        self._tools = tools
        self._complete: list[NamedCall] = []
        self._call: JsonCall | None = None  # the one that is being read

    @property
    def calls(self) -> list[NamedCall]:
        return self._complete + (self._call.calls if self._call else [])

    def scan(self, text: str) -> Status:
        while True:
            if self._call is None:
                start = skip_blanks(text, self.end)
                if text.startswith("]", start) and self._complete:
                    self.end = start + 1
                    return Status.COMPLETE
                if start < len(text) and text[start] != ("," if self._complete else "["):
                    return Status.INVALID
                start = skip_blanks(text, start + 1)
                if start >= len(text):
                    return Status.GROWING
                self._call = JsonCall(start, self._tools)
            status = self._call.scan(text)
            if self._call.calls:
                self.end = self._call.end
            if status is not Status.COMPLETE:
                return status
            self._complete += self._call.calls
            self._call = None


class NamedArguments:
    """Scans NAME[ARGS]{...}, where [ARGS] may be missing and [CALL_ID] with an id may come before it."""

    def __init__(self, start: int, tools: Tools | None) -> None:
        self._start, self._tools = start, tools
        self._name = ""
        self._arguments: ObjectScanner | None = None
        self.calls: list[NamedCall] = []

    @property
    def end(self) -> int:
        return self._start if self._arguments is None else self._arguments.end

    def scan(self, text: str) -> Status:
        if self._arguments is None:
            start = self._find_arguments(text)
            if isinstance(start, Status):
                return start
            if start == len(text):
                return Status.GROWING
            self._arguments = ObjectScanner(start)
            self._start = start
        status = self._arguments.scan(text)
        if self._arguments.end > self._start:
            self.calls = [(self._name, text[self._start : self._arguments.end])]
        return status

    def _find_arguments(self, text: str) -> int | Status:
        """Where the arguments begin, once this is certain. Whether there are any is left to their scanner."""
        name = _NAME.match(text, self._start)
        if name is None or (self._tools is not None and name.end() < len(text) and name[0] not in self._tools):
            return Status.INVALID
        self._name, at = name[0], skip_blanks(text, name.end())
        if text.startswith(CALL_ID, at):
            call_id = _NAME.match(text, start := skip_blanks(text, at + len(CALL_ID)))
            if call_id is None:
                return Status.INVALID if start < len(text) else Status.GROWING
            at = skip_blanks(text, call_id.end())
        elif is_partial_tag(text, at, CALL_ID):
            return Status.GROWING
        if is_partial_tag(text, at, ARGS):
            return Status.GROWING
        return skip_blanks(text, at + len(ARGS)) if text.startswith(ARGS, at) else at
