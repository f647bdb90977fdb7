"""Split tool calls from the text of a completion, in the formats that models are trained on."""

from __future__ import annotations

from enum import Enum, auto

from nanovllm.server.parsers.call_format import CallFormat, CallScanner, NamedCall, Tools
from nanovllm.server.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallStart
from nanovllm.server.parsers.json_object import WHITESPACE, Status
from nanovllm.server.parsers.text import partial_tag_length, skip_blanks


class _Stage(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER_CALL = auto()


class CallSplitter:
    """Splits a stream into text and tool calls.

    What looks like a call is text until it names a known tool and its arguments have begun. From there on it is a call,
    whose arguments are returned as they grow, in some formats when they are complete. It ends where its text stops
    being a call; if the completion ends first, the arguments are cut.
    Whitespace next to calls is dropped, unless more text follows.
    """

    def __init__(self, format: CallFormat, tools: Tools | None) -> None:
        self._format = format
        self._starts = [start for start in (format.opener, format.bare_start) if start]  # of calls within text
        self._tools = tools  # None = any name
        self._stage = _Stage.CALL if format.begins_message else _Stage.TEXT
        self._tail = ""  # text that is held back because its meaning is not certain
        self._separator = ""  # the separator before the tail, held back as well
        self._scanner: CallScanner | None = None
        self._first_index = 0  # of the calls of the scanner
        self._blanks = ""  # whitespace at the end of the text so far
        self._num_calls = 0
        self._num_sent = 0  # characters of the last call's arguments that have been returned

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
        begin = min((at for start in self._starts if (at := self._tail.find(start)) >= 0), default=-1)
        if begin >= 0:
            self._emit_text(self._take(begin), events)
            self._stage = _Stage.CALL
            return True
        held = 0 if finished else max((partial_tag_length(self._tail, start) for start in self._starts), default=0)
        self._emit_text(self._take(len(self._tail) - held), events)
        return False

    def _call(self, events: list[Event], finished: bool) -> bool:
        if self._scanner is None:
            start = self._call_start(finished)
            if start is None:
                return finished and self._no_call(events)
            self._scanner = self._format.scanner(start, self._tools)
            self._first_index = self._num_calls
        status = self._scanner.scan(self._tail)
        self._emit_calls(self._scanner.calls, events)
        if status is Status.GROWING and not finished:
            return False
        scanner, self._scanner = self._scanner, None
        if scanner.calls:
            self._take(len(self._tail) if status is Status.GROWING else scanner.end)
            self._separator = ""
            self._stage = _Stage.AFTER_CALL
        else:
            self._reject(events)
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

    def _call_start(self, finished: bool) -> int | None:
        """Where the call must begin: after whitespace and an opener. None if more text is needed to decide."""
        start = skip_blanks(self._tail, 0)
        opener = self._format.opener
        if opener and self._tail.startswith(opener, start):
            start = skip_blanks(self._tail, start + len(opener))
        elif not finished and opener.startswith(self._tail[start:]):
            return None
        return start if start < len(self._tail) else None

    def _no_call(self, events: list[Event]) -> bool:
        """The completion ended before a call began. A separator at the end is dropped, other text is kept."""
        if self._separator and not self._tail.strip(WHITESPACE):
            self._separator = self._tail = ""
            return False
        self._reject(events)
        return True

    def _reject(self, events: list[Event]) -> None:
        """What looked like a call is text. Another call may follow after its beginning."""
        blanks = skip_blanks(self._tail, 0)
        passed = next((blanks + len(start) for start in self._starts if self._tail.startswith(start, blanks)), 0)
        self._emit_text(self._separator + self._take(passed), events)
        self._separator = ""
        self._stage = _Stage.TEXT

    def _emit_calls(self, calls: list[NamedCall], events: list[Event]) -> None:
        """Emit what is new in the calls of the scanner."""
        for index, (name, arguments) in enumerate(calls, self._first_index):
            if index == self._num_calls:
                events.append(ToolCallStart(index, self._format.new_id(), name))
                self._num_calls += 1
                self._num_sent = 0
            if index == self._num_calls - 1 and len(arguments) > self._num_sent:
                events.append(ToolCallArguments(index, arguments[self._num_sent :]))
                self._num_sent = len(arguments)

    def _emit_text(self, text: str, events: list[Event]) -> None:
        text = self._blanks + text
        stripped = text.rstrip()
        self._blanks = text[len(stripped) :]
        if stripped:
            events.append(ContentDelta(stripped))

    def _take(self, count: int) -> str:
        taken, self._tail = self._tail[:count], self._tail[count:]
        return taken


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
