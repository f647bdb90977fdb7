"""Read the calls of Gemma 4 and FunctionGemma: call:NAME{key:value,...}, with a tag of its own as the quote.

<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:[1,2],units:{wind:<|"|>km/h<|"|>}}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from nanovllm.server.parsers.argument_types import PYTHON_WORDS, json_kind
from nanovllm.server.parsers.call_format import CallScanner, NamedCall, Tools
from nanovllm.server.parsers.json_object import Status
from nanovllm.server.parsers.text import is_partial_tag, skip_blanks

PREFIX = "call:"

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_BARE_KEY = re.compile(r"[^:{}\[\],]*")
_BARE_VALUE = re.compile(r"[^{}\[\],]*")


def gemma_call(quote: str) -> Callable[[int, Tools | None], CallScanner]:
    """The scanner of calls whose strings stand between two of these quotes."""
    return lambda start, tools: GemmaCall(quote, start, tools)


class GemmaCall:
    """Scans a call that begins at `start`."""

    def __init__(self, quote: str, start: int, tools: Tools | None) -> None:
        self._quote, self._tools = quote, tools
        self._mark = re.compile(rf"[{{}}\[\]]|{re.escape(quote)}")
        self._name = ""
        self._start = start  # of the call; then of its arguments
        self.end = start  # of the marks that have been read
        self._depth = 0  # of open brackets; 0 = before the arguments
        self._is_quoted = False
        self.calls: list[NamedCall] = []

    def scan(self, text: str) -> Status:
        if not self._depth:
            status = self._read_name(text)
            if status is not Status.COMPLETE:
                return status
        while self._depth:
            mark = self._mark.search(text, self.end)
            if mark is None:
                self.end = max(self.end, len(text) - len(self._quote) + 1)
                return Status.GROWING
            self._read_mark(mark)
        arguments = gemma_json(text[self._start : self.end], self._quote)
        self.calls = [] if arguments is None else [(self._name, arguments)]
        return Status.COMPLETE if self.calls else Status.INVALID

    def _read_name(self, text: str) -> Status:
        """Read up to the bracket that begins the arguments."""
        if not text.startswith(PREFIX, self._start):
            return Status.GROWING if is_partial_tag(text, self._start, PREFIX) else Status.INVALID
        start = self._start + len(PREFIX)
        name = _NAME.match(text, start)
        if name is None:
            return Status.GROWING if start == len(text) else Status.INVALID
        bracket = skip_blanks(text, name.end())
        if bracket == len(text):
            return Status.GROWING
        if text[bracket] != "{" or (self._tools is not None and name[0] not in self._tools):
            return Status.INVALID
        self._name, self._start, self.end, self._depth = name[0], bracket, bracket + 1, 1
        return Status.COMPLETE

    def _read_mark(self, mark: re.Match[str]) -> None:
        self.end = mark.end()
        if mark[0] == self._quote:
            self._is_quoted = not self._is_quoted
        elif not self._is_quoted:
            self._depth += 1 if mark[0] in "{[" else -1


def gemma_json(text: str, quote: str) -> str | None:
    """The same value as JSON; None if the text is not an object. A bare word that is no JSON value is a string."""
    parts: list[str] = []
    brackets: list[str] = []  # that are open
    at = skip_blanks(text, 0)
    while at < len(text):
        char = text[at]
        if text.startswith(quote, at):
            end = text.find(quote, at + len(quote))
            if end < 0:
                return None
            parts.append(json.dumps(text[at + len(quote) : end], ensure_ascii=False))
            at = end + len(quote)
        elif char in "{}[],:":
            if char in "{[":
                brackets.append(char)
            elif char in "}]" and brackets:
                brackets.pop()
            parts.append(char)
            at += 1
        else:
            is_key = brackets[-1:] == ["{"] and parts[-1] in ("{", ",")
            word = (_BARE_KEY if is_key else _BARE_VALUE).match(text, at)
            assert word is not None
            parts.append(_bare_json(word[0].strip(), is_key=is_key))
            at = word.end()
        at = skip_blanks(text, at)
    value = "".join(parts)
    return value if json_kind(value) == "object" else None


def _bare_json(word: str, *, is_key: bool) -> str:
    value = PYTHON_WORDS.get(word, word)
    return json.dumps(word, ensure_ascii=False) if is_key or json_kind(value) is None else value
