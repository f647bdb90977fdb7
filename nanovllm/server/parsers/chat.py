"""The parser of one completion: reasoning first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.server.parsers.call_format import CALL_OR_CONTENT, FORCED_CALL, CallFormat, Tools
from nanovllm.server.parsers.choice import ToolChoice, call_format, known_tools, resolve_choice
from nanovllm.server.parsers.events import ContentDelta, Event, ParsedMessage, ReasoningDelta, ToolCallStart, collect
from nanovllm.server.parsers.harmony import HARMONY, HarmonyParser
from nanovllm.server.parsers.reasoning import (
    REASONING_FORMATS,
    REASONING_PARSERS,
    ReasoningFormat,
    ReasoningSplitter,
    ReasoningTokenCounter,
)
from nanovllm.server.parsers.tools import CallSplitter


class ChatParser:
    """Parses a completion as it streams. Text is held back while its meaning is not certain, such as a partial tag.

    However the completion is cut into deltas, the events add up to the same message.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None,
        starts_in_reasoning: bool,
        call_format: CallFormat | None,
        tools: Tools | None,
    ) -> None:
        self._reasoning_format = reasoning
        self._starts_in_reasoning = starts_in_reasoning
        self._call_format = call_format
        self._tools = tools
        self._calls = CallSplitter(call_format, tools) if call_format else None
        self._reasoning = None
        if reasoning is not None:
            self._reasoning = ReasoningSplitter(
                reasoning,
                starts_in_reasoning=starts_in_reasoning,
                call_opener=call_format.opener if call_format else "",
                has_call=self._has_call,
            )

    def feed(self, delta: str, *, finished: bool = False) -> list[Event]:
        """The events that the delta makes certain. The last call has finished=True and also returns held back text."""
        reasoning, rest = self._reasoning.feed(delta, finished=finished) if self._reasoning else ("", delta)
        events: list[Event] = [ReasoningDelta(reasoning)] if reasoning else []
        if self._calls:
            return events + self._calls.feed(rest, finished=finished)
        return [*events, ContentDelta(rest)] if rest else events

    def _has_call(self, text: str) -> bool:
        """Whether a complete text has a tool call."""
        events = CallSplitter(self._call_format, self._tools).feed(text, finished=True) if self._call_format else []
        return any(isinstance(event, ToolCallStart) for event in events)

    @property
    def rest_is_content(self) -> bool:
        """True if all text from here on is content, so that it needs no parsing."""
        return self._calls is None and (self._reasoning is None or self._reasoning.is_over)

    @property
    def tags(self) -> list[str]:
        """The tags without which nothing can be parsed, so that they must be in the text if they are special tokens."""
        tags = [self._reasoning_format.close] if self._reasoning_format else []
        return [*tags, self._call_format.opener] if self._call_format else tags

    def counter(self, token_id: Callable[[str], int | None]) -> ReasoningTokenCounter | None:
        """A counter of the completion's reasoning tokens; None without reasoning or if its end is not a single token.

        `token_id`: from the text of a token to its id.
        """
        format = self._reasoning_format
        close_id = None if format is None else token_id(format.close)
        if format is None or close_id is None:
            return None
        return ReasoningTokenCounter(
            token_id(format.open_token), close_id, starts_in_reasoning=self._starts_in_reasoning
        )

    def parse(self, text: str) -> ParsedMessage:
        """Parse a complete text, independently of what was fed before."""
        return collect(self.new_copy().feed(text, finished=True))

    def new_copy(self) -> ChatParser:
        """The same parser in its initial state. Each completion of a request needs its own."""
        return ChatParser(
            reasoning=self._reasoning_format,
            starts_in_reasoning=self._starts_in_reasoning,
            call_format=self._call_format,
            tools=self._tools,
        )


def make_parser(
    *,
    reasoning: str | None,
    tools: str | None,
    tool_schemas: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    prompt_opens_reasoning: bool = False,
    begun: str = "",
    is_object: bool = False,
) -> ChatParser | HarmonyParser:
    """Make the parser for one request. `reasoning` and `tools` are names of parsers, or None. `begun`: in harmony, the
    message that the prompt ends within. `is_object`: with tool_choice "auto", the message follows
    `call_or_content_schema`.

    A forced call (tool_choice "required" or a named tool) follows the grammar of `forced_call_schema` from its first
    token on, so it has no reasoning and none of the model's tags. Without a tool parser, the calls that the model makes
    for tool_choice "auto" have the form of forced calls, too: an object at the beginning of the message.
    """
    check_parsers(reasoning=reasoning, tools=tools)
    choice = resolve_choice(tool_schemas, tool_choice)
    new_id = call_format(tools).new_id
    if choice == "required" or isinstance(choice, Mapping):
        forced = replace(FORCED_CALL, new_id=new_id)
        return _object_parser(forced, known_tools(tool_schemas if isinstance(choice, str) else [choice]))
    if is_object and choice == "auto":
        return _object_parser(replace(CALL_OR_CONTENT, new_id=new_id), known_tools(tool_schemas))
    if reasoning == HARMONY:
        return HarmonyParser(known_tools(tool_schemas) if choice == "auto" else {}, begun=begun)
    format = None if reasoning is None else REASONING_FORMATS[reasoning]
    return ChatParser(
        reasoning=format,
        starts_in_reasoning=format is not None and (prompt_opens_reasoning or format.is_open),
        call_format=call_format(tools) if choice == "auto" else None,
        tools=known_tools(tool_schemas),
    )


def check_parsers(*, reasoning: str | None, tools: str | None) -> None:
    """Raise a ConfigError for unknown parser names."""
    call_format(tools)
    if reasoning is not None and reasoning not in REASONING_PARSERS:
        raise ConfigError(f"unknown reasoning parser {reasoning!r}; known are {', '.join(sorted(REASONING_PARSERS))}")


def parse_forced_call(text: str) -> ParsedMessage:
    """Parse a completion that follows `forced_call_schema`. If the length limit truncated it, so are the arguments."""
    return _object_parser(FORCED_CALL, None).parse(text)


def _object_parser(format: CallFormat, tools: Tools | None) -> ChatParser:
    return ChatParser(reasoning=None, starts_in_reasoning=False, call_format=format, tools=tools)
