"""Tool calls split from the answer's text, in the formats the models were trained on."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from nanovllm.server.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallStart, new_call_id
from nanovllm.server.parsers.json_object import WHITESPACE, ObjectScanner, Status
from nanovllm.server.parsers.text import held_back

# The arguments' names in the known formats. Models mix them up, so either is read.
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class CallFormat:
    """How a model writes {"name": ..., "arguments": {...}}."""

    arguments_key: str
    opener: str = ""  # before an object, anywhere in the text
    closer: str = ""  # after it; models cut short leave it out
    separator: str = ""  # between objects, in place of another opener
    begins_message: bool = False  # the object may also stand at the very beginning, without an opener


TOOL_PARSERS = {
    "hermes": CallFormat("arguments", opener="<tool_call>", closer="</tool_call>"),
    "llama3_json": CallFormat("parameters", opener="<|python_tag|>", separator=";", begins_message=True),
}
# What a grammar makes of the answer: the object and nothing else.
FORCED_CALL = CallFormat("arguments", begins_message=True)


class _Stage(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER_CALL = auto()


class CallSplitter:
    """A call leaves once its object is complete, names a known tool and holds an object of arguments.

    Whatever turns out not to be one is text. Blanks next to calls belong to the calls, unless more text follows.
    """

    def __init__(self, format: CallFormat, tool_names: Collection[str] | None) -> None:
        self._format = format
        self._tool_names = tool_names  # None: any
        self._stage = _Stage.CALL if format.begins_message else _Stage.TEXT
        self._tail = ""  # what is not certain yet
        self._lead = ""  # a separator before the tail, not certain yet either
        self._scanner: ObjectScanner | None = None
        self._blanks = ""  # at the end of the text so far
        self._num_calls = 0

    def feed(self, delta: str, *, finished: bool) -> list[Event]:
        self._tail += delta
        events: list[Event] = []
        while self._step(events, finished):
            pass
        if finished and not self._num_calls and self._blanks:
            events.append(ContentDelta(self._blanks))
        return _merged(events) if len(events) > 1 else events

    def _step(self, events: list[Event], finished: bool) -> bool:
        """Settle what can be; True if the next step may settle more."""
        if self._stage is _Stage.TEXT:
            return self._text(events, finished)
        if self._stage is _Stage.CALL:
            return self._call(events, finished)
        return self._after_call(events, finished)

    def _text(self, events: list[Event], finished: bool) -> bool:
        opener = self._format.opener
        begin = self._tail.find(opener) if opener else -1
        if begin >= 0:
            self._say(self._take(begin), events)
            self._stage = _Stage.CALL
            return True
        held = 0 if finished else held_back(self._tail, opener)
        self._say(self._take(len(self._tail) - held), events)
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
        """Drop the closing tag; go on with another call behind a separator."""
        mark = self._format.closer or self._format.separator
        rest = self._tail.lstrip(WHITESPACE)
        if mark and rest.startswith(mark):
            passed = self._take(len(self._tail) - len(rest) + len(mark))
            self._lead = passed if self._format.separator else ""
            self._stage = _Stage.CALL if self._format.separator else _Stage.TEXT
            return True
        if mark.startswith(rest):
            if finished:
                self._tail = ""
            return False
        self._stage = _Stage.TEXT
        return True

    def _object_start(self, finished: bool) -> int | None:
        """Where the object must begin: behind blanks and an opener. None: more text is needed to say."""
        start = _skip_blanks(self._tail, 0)
        opener = self._format.opener
        if opener and self._tail.startswith(opener, start):
            start = _skip_blanks(self._tail, start + len(opener))
        elif not finished and opener.startswith(self._tail[start:]):
            return None
        return start if start < len(self._tail) else None

    def _no_object(self, events: list[Event]) -> bool:
        """The answer ended before one began. A separator that nothing follows is no text."""
        if self._lead and not self._tail.strip(WHITESPACE):
            self._lead = self._tail = ""
            return False
        self._reject(events)
        return True

    def _reject(self, events: list[Event]) -> None:
        """What looked like a call is text; calls may follow behind its opener."""
        start = _skip_blanks(self._tail, 0)
        has_opener = self._format.opener and self._tail.startswith(self._format.opener, start)
        self._say(self._lead + self._take(start + len(self._format.opener) if has_opener else 0), events)
        self._lead = ""
        self._stage = _Stage.TEXT

    def _accept(self, name: str, arguments: str, events: list[Event]) -> None:
        index = self._num_calls
        events += [ToolCallStart(index, new_call_id(), name), ToolCallArguments(index, arguments)]
        self._num_calls += 1
        self._lead = ""
        self._stage = _Stage.AFTER_CALL

    def _say(self, text: str, events: list[Event]) -> None:
        text = self._blanks + text
        said = text.rstrip()
        self._blanks = text[len(said) :]
        if said:
            events.append(ContentDelta(said))

    def _take(self, count: int) -> str:
        taken, self._tail = self._tail[:count], self._tail[count:]
        return taken


def _read_call(text: str, scanned: ObjectScanner, tool_names: Collection[str] | None) -> tuple[str, str] | None:
    """Name and arguments of a call of a known tool; None if the object is not one. No arguments are empty ones."""
    members = {key: text[place] for key, place in scanned.members.items()}
    name = members.get("name", "")
    arguments = next((members[key] for key in ARGUMENT_KEYS if key in members), "{}")
    if not name.startswith('"') or not arguments.startswith("{"):
        return None
    name = json.loads(name)
    return (name, arguments) if tool_names is None or name in tool_names else None


def _skip_blanks(text: str, start: int) -> int:
    return len(text) - len(text[start:].lstrip(WHITESPACE))


def _merged(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of text as one."""
    merged: list[Event] = []
    for event in events:
        match merged[-1:], event:
            case [ContentDelta(before)], ContentDelta(text):
                merged[-1] = ContentDelta(before + text)
            case _:
                merged.append(event)
    return merged
