"""An incremental scanner for one JSON object in a growing text: is it complete or invalid, and where are its members?

It follows RFC 8259 strictly (no NaN, no raw control characters in strings), does not recurse, and reads each character
once, except those of an unfinished literal or number. Members are slices of the text, so that they can be passed on
exactly as generated: parsing and encoding them again would turn 1e400 into Infinity, and "\\ud800" into text that UTF-8
cannot encode.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

WHITESPACE = " \t\n\r"

_BLANK = re.compile(r"[ \t\n\r]*")
_STRING_BODY = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


class Status(Enum):
    GROWING = auto()
    COMPLETE = auto()
    INVALID = auto()


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class ObjectScanner:
    """Scans an object that begins at `start`. Call `scan` with the whole text each time it has grown."""

    def __init__(self, start: int) -> None:
        self.end = start  # the end of the scanned text; of the object, once it is complete
        self.members: dict[str, slice] = {}  # name -> value; of duplicate names the first counts: it may have been sent
        self.keys: list[str] = []  # the names that have been read, also those whose value has not, and duplicates
        self._closers: list[str] = []  # the closing brackets of all open objects and arrays, innermost last
        self._expect = _Expect.VALUE
        self._string_start: int | None = None
        self._key = ""
        self._value_start = start

    def scan(self, text: str) -> Status:
        """Continue where the last call stopped."""
        if self.end == self._value_start and not self._closers and not text.startswith("{", self.end):
            return Status.INVALID if self.end < len(text) else Status.GROWING
        status = Status.GROWING
        while status is Status.GROWING:
            before = self.end
            status = self._finish_string(text) if self._string_start is not None else self._next(text)
            if self.end == before:
                return status
        return status

    @property
    def members_so_far(self) -> dict[str, slice]:
        """The members, and last the one whose value is an object or a list that is not complete yet."""
        if len(self._closers) < 2 or self._key in self.members:
            return self.members
        return {**self.members, self._key: slice(self._value_start, self.end)}

    def _next(self, text: str) -> Status:
        self.end = _end_of(_BLANK, text, self.end)
        if self.end == len(text):
            return Status.GROWING
        char = text[self.end]
        if self._expect is _Expect.COLON:
            return self._step(_Expect.VALUE) if char == ":" else Status.INVALID
        if self._expect is _Expect.COMMA_OR_END:
            return self._after_value(char)
        if char in "]}" and self._expect in (_Expect.VALUE_OR_END, _Expect.KEY_OR_END):
            return self._close(char)
        if self._expect in (_Expect.KEY, _Expect.KEY_OR_END) and char != '"':
            return Status.INVALID
        return self._begin(text, char)

    def _begin(self, text: str, char: str) -> Status:
        """Begin a key or a value."""
        if len(self._closers) == 1:
            self._value_start = self.end
        if char == '"':
            self._string_start = self.end
            self.end += 1
            return Status.GROWING
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            return self._step(_Expect.KEY_OR_END if char == "{" else _Expect.VALUE_OR_END)
        word = _WORD.match(text, self.end)
        if word is None:
            return Status.INVALID
        if word.end() == len(text):
            return Status.GROWING
        if _SCALAR.fullmatch(word.group()) is None:
            return Status.INVALID
        self.end = word.end()
        return self._value_done()

    def _finish_string(self, text: str) -> Status:
        self.end = _end_of(_STRING_BODY, text, self.end)
        if self.end == len(text) or _BEGUN_ESCAPE.fullmatch(text, self.end):
            return Status.GROWING
        if text[self.end] != '"':
            return Status.INVALID
        self.end += 1
        start, self._string_start = self._string_start, None
        if self._expect not in (_Expect.KEY, _Expect.KEY_OR_END):
            return self._value_done()
        if len(self._closers) == 1:
            self._key = json.loads(text[start : self.end])
            self.keys.append(self._key)
        self._expect = _Expect.COLON
        return Status.GROWING

    def _after_value(self, char: str) -> Status:
        if char == ",":
            return self._step(_Expect.KEY if self._closers[-1] == "}" else _Expect.VALUE)
        return self._close(char)

    def _close(self, char: str) -> Status:
        if char != self._closers[-1]:
            return Status.INVALID
        self._closers.pop()
        self.end += 1
        return self._value_done() if self._closers else Status.COMPLETE

    def _value_done(self) -> Status:
        if len(self._closers) == 1:
            self.members.setdefault(self._key, slice(self._value_start, self.end))
        self._expect = _Expect.COMMA_OR_END
        return Status.GROWING

    def _step(self, expect: _Expect) -> Status:
        self.end += 1
        self._expect = expect
        return Status.GROWING


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return found.end() if found else start
