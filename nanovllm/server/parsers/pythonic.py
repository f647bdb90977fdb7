"""Read the calls of LFM2, a list of Python calls between two tags: [weather(city="Bern", days=[1, 2]), now()]."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from nanovllm.server.parsers.argument_types import PYTHON_WORDS, json_kind
from nanovllm.server.parsers.call_format import CallScanner, NamedCall, Tools
from nanovllm.server.parsers.json_object import Status

_TOKEN = re.compile(
    r"""\s*(?:('(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")|([\[\](){},:=])|([^\s'"\[\](){},:=]+))\s*""", re.DOTALL
)
_OPENING, _CLOSING = ("(", "[", "{"), (")", "]", "}")
_TO_ESCAPE = re.compile(r'\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|["\x00-\x1f]', re.DOTALL)


def pythonic_calls(closer: str) -> Callable[[int, Tools | None], CallScanner]:
    """The scanner of lists of calls that end with this tag."""
    return lambda start, tools: PythonicCalls(closer, start, tools)


class PythonicCalls:
    """Scans a list of calls that begins at `start`."""

    def __init__(self, closer: str, start: int, tools: Tools | None) -> None:
        self._closer, self._start, self._tools = closer, start, tools
        self.end = start  # the closer is not before
        self.calls: list[NamedCall] = []

    def scan(self, text: str) -> Status:
        closer = text.find(self._closer, self.end)
        if closer < 0:
            self.end = max(self.end, len(text) - len(self._closer) + 1)
            return Status.GROWING
        self.end = closer + len(self._closer)
        self.calls = _read_calls(text[self._start : closer], self._tools)
        return Status.COMPLETE if self.calls else Status.INVALID


def _read_calls(text: str, tools: Tools | None) -> list[NamedCall]:
    """The calls in a list; empty if it is not a list of calls of known tools."""
    tokens = _tokens(text)
    calls: list[NamedCall] = []
    at = 0  # of the bracket or comma before a call
    while tokens[at : at + 1] == ["," if calls else "["] and tokens[at + 2 : at + 3] == ["("]:
        name, end = tokens[at + 1], _end_of_bracket(tokens, at + 2)
        arguments = _json_object(tokens[at + 2 : end])
        if arguments is None or (tools is not None and name not in tools):
            return []
        calls.append((name, arguments))
        at = end
    return calls if tokens[at:] == ["]"] else []


def _tokens(text: str) -> list[str]:
    """Strings with their quotes, brackets and other marks, and words; empty if the text has anything else."""
    tokens, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return []
        tokens.append(token[1] or token[2] or token[3])
        at = token.end()
    return tokens


def _end_of_bracket(tokens: list[str], start: int) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(tokens)):
        depth += (tokens[position] in _OPENING) - (tokens[position] in _CLOSING)
        if depth == 0:
            return position + 1
    return len(tokens)


def _json_object(tokens: list[str]) -> str | None:
    """The arguments of a call, with the brackets around them, as JSON; None if they have no such form."""
    parts: list[str] = []
    depth = 0
    for token in tokens:
        if token in _OPENING:
            depth += 1
            parts.append("{" if depth == 1 else "[" if token == "(" else token)
        elif token in _CLOSING:
            parts.append("}" if depth == 1 else "]" if token == ")" else token)
            depth -= 1
        elif token == "=" and depth == 1:
            parts.append(":")
        elif token[0] in "'\"":
            parts.append(f'"{_TO_ESCAPE.sub(_escape, token[1:-1])}"')
        elif depth == 1 and parts[-1] in ("{", ","):
            parts.append(json.dumps(token))
        else:
            parts.append(PYTHON_WORDS.get(token, token))
    value = "".join(parts)
    return value if json_kind(value) == "object" else None


def _escape(found: re.Match[str]) -> str:
    """A part of a Python string as JSON writes it."""
    escaped = found[1]
    if escaped is None:
        return json.dumps(found[0])[1:-1]
    if escaped == "'":
        return "'"
    if escaped[0] == "x":
        return f"\\u00{escaped[1:]}" if len(escaped) == 3 else "\\\\x"
    if escaped[0] == "u":
        return f"\\{escaped}" if len(escaped) == 5 else "\\\\u"
    return f"\\{escaped}" if escaped in 'nrtbf"\\' else f"\\\\{json.dumps(escaped)[1:-1]}"
