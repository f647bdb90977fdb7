"""The parser of one answer: thinking first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.errors import ConfigError, RequestError
from nanovllm.server.parsers.choice import ToolChoice, call_format, resolve_choice, tool_names
from nanovllm.server.parsers.events import ContentDelta, Event, ParsedMessage, ReasoningDelta, collect
from nanovllm.server.parsers.reasoning import REASONING_PARSERS, ThinkingCounter, ThinkingSplitter
from nanovllm.server.parsers.tools import FORCED_CALL, TOOL_PARSERS, CallFormat, CallSplitter


class ChatParser:
    """Fed with an answer piece by piece, it hands out what is certain; what is not yet, it keeps and reads again.

    However the answer is cut into pieces, the events add up to the same message.
    """

    def __init__(
        self, *, thinks: bool, starts_inside: bool, call_format: CallFormat | None, tool_names: frozenset[str] | None
    ) -> None:
        self._thinks = thinks
        self._starts_inside = starts_inside
        self._call_format = call_format
        self._tool_names = tool_names
        self._thinking = ThinkingSplitter(starts_inside=starts_inside) if thinks else None
        self._calls = CallSplitter(call_format, tool_names) if call_format else None

    def feed(self, delta: str, *, finished: bool = False) -> list[Event]:
        """What the delta made certain; with finished=True, all that is left. Nothing may be fed after that."""
        reasoning, rest = self._thinking.feed(delta, finished=finished) if self._thinking else ("", delta)
        events: list[Event] = [ReasoningDelta(reasoning)] if reasoning else []
        if self._calls:
            return events + self._calls.feed(rest, finished=finished)
        return [*events, ContentDelta(rest)] if rest else events

    @property
    def passes_rest(self) -> bool:
        """Will all that comes be content, so that nothing of it need be looked at?"""
        return self._calls is None and (self._thinking is None or self._thinking.is_over)

    def counter(self, open_id: int | None, close_id: int | None) -> ThinkingCounter | None:
        """Counts the tokens of one answer's thinking; None if there is none, or its end is no single token."""
        if not self._thinks or close_id is None:
            return None
        return ThinkingCounter(open_id, close_id, starts_inside=self._starts_inside)

    def parse(self, text: str) -> ParsedMessage:
        """A whole answer at once, whatever was fed before."""
        return collect(self.fresh().feed(text, finished=True))

    def fresh(self) -> ChatParser:
        """The same parser before its first delta: each completion of a request needs its own."""
        return ChatParser(
            thinks=self._thinks,
            starts_inside=self._starts_inside,
            call_format=self._call_format,
            tool_names=self._tool_names,
        )


def make_parser(
    *,
    reasoning: str | None,
    tools: str | None,
    tool_schemas: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    prompt_ends_in_thinking: bool = False,
) -> ChatParser:
    """The parser for one request; `reasoning` and `tools` are the names of the model's formats.

    A forced call (tool_choice "required" or named) is written under `tool_grammar` from its first token on, so it holds
    no thinking and none of the model's tags.
    """
    check_parsers(reasoning=reasoning, tools=tools)
    choice = resolve_choice(tool_schemas, tool_choice)
    if choice == "required" or isinstance(choice, Mapping):
        return _forced_parser(tool_names(tool_schemas if isinstance(choice, str) else [choice]))
    if choice == "auto" and tools is None:
        raise RequestError(
            'tool_choice "auto" needs the format in which the model writes calls: start the server with a tool parser '
            f"({', '.join(sorted(TOOL_PARSERS))}), or ask for tool_choice none, required or one tool by name"
        )
    return ChatParser(
        thinks=reasoning is not None,
        starts_inside=reasoning is not None and (prompt_ends_in_thinking or REASONING_PARSERS[reasoning]),
        call_format=call_format(tools) if choice == "auto" else None,
        tool_names=tool_names(tool_schemas),
    )


def check_parsers(*, reasoning: str | None, tools: str | None) -> None:
    """Refuse unknown names, so that a server says so when it starts."""
    call_format(tools)
    if reasoning is not None and reasoning not in REASONING_PARSERS:
        raise ConfigError(f"unknown reasoning parser {reasoning!r}; known are {', '.join(sorted(REASONING_PARSERS))}")


def parse_forced(text: str) -> ParsedMessage:
    """An answer written under `tool_grammar`, which has seen to the name. One that was cut short is content."""
    return _forced_parser(None).parse(text)


def _forced_parser(names: frozenset[str] | None) -> ChatParser:
    return ChatParser(thinks=False, starts_inside=False, call_format=FORCED_CALL, tool_names=names)
