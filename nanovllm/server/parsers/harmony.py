"""Parse harmony, the format of gpt-oss: a completion is a sequence of messages, each with a channel.

    <|channel|>analysis<|message|>The user asks ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>Hello.<|return|>

The prompt ends within the first header, and the tags <|call|> and <|return|> end the completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

from nanovllm.server.parsers.events import (
    ContentDelta,
    Event,
    ParsedMessage,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    collect,
    new_call_id,
)
from nanovllm.server.parsers.json_object import WHITESPACE
from nanovllm.server.parsers.text import partial_tag_length

HARMONY = "harmony"  # the name of the parser
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

_TAG = re.compile("|".join(map(re.escape, TAGS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."  # before the name of a tool; other recipients are tools that the model would run itself

# What makes a completion content from its first token on, if the prompt ends with the role
OPENS_CONTENT = f"{CHANNEL}final{MESSAGE}"


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


def open_message(prompt: str) -> str:
    """The beginning of the message that the prompt ends within: its header, or a part of its text too."""
    return prompt.rpartition(START)[2] if START in prompt else ""


def needs_channel(prompt: str) -> bool:
    """Whether the prompt ends with the role of the message to generate, so that a header would follow."""
    return open_message(prompt) == "assistant"


class HarmonyParser:
    """Parses a completion as it streams; like `ChatParser`, for another format.

    Messages of the channel analysis, and those to tools of the model itself, are reasoning. A message to a known
    function is a call if its text begins as a JSON object does; all of its text, as it comes, is the arguments. All
    others are content. Several messages of a kind are joined by newlines. A completion without any message is content.
    """

    def __init__(self, tool_names: Collection[str], *, begun: str = "") -> None:
        """`begun`: the beginning of the message that the prompt ends within."""
        self._begun = begun
        self._tool_names: Collection[str] = ()  # a call that the prompt begins is returned with what follows
        self._kind: _Kind | None = None  # of the open message; None = in a header
        self._header = ""
        self._name = ""  # of the function that is called
        self._body = ""  # of a call: what has not been returned
        self._has_arguments = False  # the open message is a call that has been returned, up to its body
        self._tail = ""  # held back: it may be the beginning of a tag
        self._before_messages = ""  # the completion, as long as no message began
        self._has_text: set[_Kind] = set()  # kinds of which there was text
        self._breaks_line = False  # the open message is not the first of its kind and has no text yet
        self._num_calls = 0
        self._read(begun, [], finished=True)
        self._tool_names = tool_names
        self._has_text.clear()
        self._breaks_line = False
        self._began = self._kind is not None

    def feed(self, delta: str, *, finished: bool = False) -> list[Event]:
        """The events that the delta makes certain. The last call has finished=True and also returns held back text."""
        events: list[Event] = []
        if not self._began:
            self._before_messages += delta
        self._read(delta, events, finished=finished)
        if finished:
            self._end_message(events)
            if not self._began and self._before_messages:
                events.append(ContentDelta(self._before_messages))
        return events

    @property
    def rest_is_content(self) -> bool:
        return False  # another message may follow

    @property
    def tags(self) -> tuple[str, ...]:
        return TAGS

    def counter(self, token_id: Callable[[str], int | None]) -> AnalysisTokenCounter | None:
        """A counter of the completion's reasoning tokens; None if the tags are no tokens."""
        ids = [token_id(text) for text in (CHANNEL, MESSAGE, "analysis")]
        ends = frozenset(one for tag in (START, *ENDS) if (one := token_id(tag)) is not None)
        channel, message, analysis = ids
        if channel is None or message is None or analysis is None:
            return None
        return AnalysisTokenCounter(channel, message, analysis, ends)

    def parse(self, text: str) -> ParsedMessage:
        """Parse a complete text, independently of what was fed before."""
        return collect(self.new_copy().feed(text, finished=True))

    def new_copy(self) -> HarmonyParser:
        """The same parser in its initial state. Each completion of a request needs its own."""
        return HarmonyParser(self._tool_names, begun=self._begun)

    def _read(self, delta: str, events: list[Event], *, finished: bool) -> None:
        self._tail += delta
        while tag := _TAG.search(self._tail):
            before, self._tail = self._tail[: tag.start()], self._tail[tag.end() :]
            self._read_text(before, events)
            self._read_tag(tag[0], events)
        held = 0 if finished else max(partial_tag_length(self._tail, tag) for tag in TAGS)
        certain = len(self._tail) - held
        text, self._tail = self._tail[:certain], self._tail[certain:]
        self._read_text(text, events)

    def _read_tag(self, tag: str, events: list[Event]) -> None:
        if self._kind is not None and tag in (CONSTRAIN, MESSAGE):
            self._read_text(tag, events)
            return
        self._end_message(events)
        if tag == MESSAGE:
            self._begin_message()
        else:
            self._header = self._header + tag if tag in (CHANNEL, CONSTRAIN) else ""

    def _begin_message(self) -> None:
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        if recipient is not None and recipient[1].startswith(_FUNCTIONS):
            self._kind, self._name = _Kind.CALL, recipient[1].removeprefix(_FUNCTIONS)
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._kind = _Kind.REASONING
        else:
            self._kind = _Kind.CONTENT
        self._header, self._began = "", True
        self._breaks_line = self._kind in self._has_text

    def _read_text(self, text: str, events: list[Event]) -> None:
        if self._kind is None:
            self._header += text
        elif self._kind is _Kind.CALL:
            self._body += text
            self._emit_call(events)
        else:
            self._emit(self._kind, text, events)

    def _emit_call(self, events: list[Event]) -> None:
        """Emit the call and what is new of its arguments. Whitespace around them is left out."""
        if not self._has_arguments:
            body = self._body.lstrip(WHITESPACE)
            if self._name not in self._tool_names or not body.startswith("{"):
                return
            events.append(ToolCallStart(self._num_calls, new_call_id(), self._name))
            self._body, self._has_arguments = body, True
            self._num_calls += 1
        arguments = self._body.rstrip(WHITESPACE)
        if arguments:
            events.append(ToolCallArguments(self._num_calls - 1, arguments))
            self._body = self._body[len(arguments) :]

    def _end_message(self, events: list[Event]) -> None:
        if self._kind is _Kind.CALL and not self._has_arguments:
            self._breaks_line = _Kind.CONTENT in self._has_text
            self._emit(_Kind.CONTENT, self._body, events)
        self._kind, self._body, self._has_arguments = None, "", False

    def _emit(self, kind: _Kind, text: str, events: list[Event]) -> None:
        if not text:
            return
        text = f"\n{text}" if self._breaks_line else text
        self._breaks_line = False
        self._has_text.add(kind)
        made = ReasoningDelta if kind is _Kind.REASONING else ContentDelta
        if events and isinstance(events[-1], made):
            text = events.pop().text + text  # type: ignore[union-attr]
        events.append(made(text))


class AnalysisTokenCounter:
    """Counts the tokens of messages of the channel analysis."""

    def __init__(self, channel_id: int, message_id: int, analysis_id: int, end_ids: frozenset[int]) -> None:
        self._channel_id, self._message_id = channel_id, message_id
        self._analysis_id, self._end_ids = analysis_id, end_ids
        self._names_channel = self._is_analysis = self._is_inside = False

    def feed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, the next of the completion, are reasoning."""
        count = 0
        for token_id in token_ids:
            if self._names_channel:
                self._is_analysis = token_id == self._analysis_id
            self._names_channel = token_id == self._channel_id
            if token_id == self._message_id:
                self._is_inside = self._is_analysis
            elif token_id in self._end_ids or token_id == self._channel_id:
                self._is_inside = self._is_analysis = False
            else:
                count += self._is_inside
        return count
