"""Split tool calls from the text of a completion, in the formats that models are trained on."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from nanovllm.server.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallStart, new_call_id
from nanovllm.server.parsers.harmony import HARMONY
from nanovllm.server.parsers.json_object import WHITESPACE, ObjectScanner, Status
from nanovllm.server.parsers.text import partial_tag_length

# The names of the arguments in the known formats. Models mix them up, so either is accepted.
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class CallFormat:
    """The format in which a model generates a call, a JSON object {"name": ..., "arguments": {...}}."""

    arguments_key: str
    opener: str = ""  # the tag before the object, anywhere in the text
    closer: str = ""  # the tag after the object; it is missing if the length limit cut the completion
    separator: str = ""  # between two objects, instead of another opener
    begins_message: bool = False  # the object may also be the beginning of the message, without an opener


# A call that is forced by a grammar: the object and nothing else.
FORCED_CALL = CallFormat("arguments", begins_message=True)
TOOL_PARSERS = {
    HARMONY: FORCED_CALL,  # where a grammar leaves no room for channels; harmony.py parses all other completions
    "hermes": CallFormat("arguments", opener="<tool_call>", closer="</tool_call>"),
    "llama3_json": CallFormat("parameters", opener="<|python_tag|>", separator=";", begins_message=True),
}


class _Stage(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER_CALL = auto()


class CallSplitter:
    """Splits a stream into text and tool calls.

    A call is returned when its object is complete, names a known tool and has an object of arguments; otherwise it is
    text. Whitespace next to calls is dropped, unless more text follows.
    """

    def __init__(self, format: CallFormat, tool_names: Collection[str] | None) -> None:
        self._format = format
        self._tool_names = tool_names  # None = any name
        self._stage = _Stage.CALL if format.begins_message else _Stage.TEXT
        self._tail = ""  # text that is held back because its meaning is not certain
        self._separator = ""  # the separator before the tail, held back as well
        self._scanner: ObjectScanner | None = None
        self._blanks = ""  # whitespace at the end of the text so far
        self._num_calls = 0

    def feed(self, delta: str, *, finished: bool) -> list[Event]:
        """The events that the delta makes certain; with `finished`, also what was held back."""
        self._tail += delta
        events: list[Event] = []
        while self._step(events, finished):
            pass
        if finished and not self._num_calls and self._blanks:
            events.append(ContentDelta(self._blanks))
        return _merged(events) if len(events) > 1 else events

    def _step(self, events: list[Event], finished: bool) -> bool:
        """Process a part of the tail. True if another step may process more."""
        if self._stage is _Stage.TEXT:
            return self._text(events, finished)
        if self._stage is _Stage.CALL:
            return self._call(events, finished)
        return self._after_call(events, finished)

    def _text(self, events: list[Event], finished: bool) -> bool:
        opener = self._format.opener
        begin = self._tail.find(opener) if opener else -1
        if begin >= 0:
            self._emit_text(self._take(begin), events)
            self._stage = _Stage.CALL
            return True
        held = 0 if finished else partial_tag_length(self._tail, opener)
        self._emit_text(self._take(len(self._tail) - held), events)
        return False

    def _call(self, events: list[Event], finished: bool) -> bool:
        if self._scanner is None:
            start = self._object_start(finished)
            if start is None:
                return finished and self._no_object(events)
            self._scanner = ObjectScanner(start)
        status = self._scanner.scan(self._tail)
        if status is Status.GROWING and not finished:
            return False
        call = _read_call(self._tail, self._scanner, self._tool_names) if status is Status.COMPLETE else None
        end, self._scanner = self._scanner.end, None
        if call is None:
            self._reject(events)
        else:
            self._accept(*call, events)
            self._take(end)
        return True

    def _after_call(self, events: list[Event], finished: bool) -> bool:
        """Drop the closing tag. After a separator, continue with another call."""
        mark = self._format.closer or self._format.separator
        rest = self._tail.lstrip(WHITESPACE)
        if mark and rest.startswith(mark):
            passed = self._take(len(self._tail) - len(rest) + len(mark))
            self._separator = passed if self._format.separator else ""
            self._stage = _Stage.CALL if self._format.separator else _Stage.TEXT
            return True
        if mark.startswith(rest):
            if finished:
                self._tail = ""
            return False
        self._stage = _Stage.TEXT
        return True

    def _object_start(self, finished: bool) -> int | None:
        """Where the object must begin: after whitespace and an opener. None if more text is needed to decide."""
        start = _skip_blanks(self._tail, 0)
        opener = self._format.opener
        if opener and self._tail.startswith(opener, start):
            start = _skip_blanks(self._tail, start + len(opener))
        elif not finished and opener.startswith(self._tail[start:]):
            return None
        return start if start < len(self._tail) else None

    def _no_object(self, events: list[Event]) -> bool:
        """The completion ended before an object began. A separator at the end is dropped, other text is kept."""
        if self._separator and not self._tail.strip(WHITESPACE):
            self._separator = self._tail = ""
            return False
        self._reject(events)
        return True

    def _reject(self, events: list[Event]) -> None:
        """What looked like a call is text. Another call may follow after its opener."""
        start = _skip_blanks(self._tail, 0)
        has_opener = self._format.opener and self._tail.startswith(self._format.opener, start)
        self._emit_text(self._separator + self._take(start + len(self._format.opener) if has_opener else 0), events)
        self._separator = ""
        self._stage = _Stage.TEXT

    def _accept(self, name: str, arguments: str, events: list[Event]) -> None:
        index = self._num_calls
        events += [ToolCallStart(index, new_call_id(), name), ToolCallArguments(index, arguments)]
        self._num_calls += 1
        self._separator = ""
        self._stage = _Stage.AFTER_CALL

    def _emit_text(self, text: str, events: list[Event]) -> None:
        text = self._blanks + text
        stripped = text.rstrip()
        self._blanks = text[len(stripped) :]
        if stripped:
            events.append(ContentDelta(stripped))

    def _take(self, count: int) -> str:
        taken, self._tail = self._tail[:count], self._tail[count:]
        return taken


def _read_call(text: str, scanned: ObjectScanner, tool_names: Collection[str] | None) -> tuple[str, str] | None:
    """(name, arguments) of a call of a known tool; None if the object is not one. Missing arguments are `{}`."""
    members = {key: text[span] for key, span in scanned.members.items()}
    name = members.get("name", "")
    arguments = next((members[key] for key in ARGUMENT_KEYS if key in members), "{}")
    if not name.startswith('"') or not arguments.startswith("{"):
        return None
    name = json.loads(name)
    return (name, arguments) if tool_names is None or name in tool_names else None


def _skip_blanks(text: str, start: int) -> int:
    return len(text) - len(text[start:].lstrip(WHITESPACE))


def _merged(events: list[Event]) -> list[Event]:
    """The events with adjacent pieces of text joined."""
    merged: list[Event] = []
    for event in events:
        match merged[-1:], event:
            case [ContentDelta(before)], ContentDelta(text):
                merged[-1] = ContentDelta(before + text)
            case _:
                merged.append(event)
    return merged
