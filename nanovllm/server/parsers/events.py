"""The results of parsing a completion: events while it streams, and the message they add up to."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    index: int
    text: str


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # a JSON object, exactly as the model generated it; cut if the length limit cut the completion


@dataclass(frozen=True)
class ParsedMessage:
    """A complete message."""

    reasoning: str | None  # None if there is none
    content: str | None  # None if there are only tool calls
    tool_calls: tuple[ToolCall, ...]


def collect(events: Iterable[Event]) -> ParsedMessage:
    """The message that all events of one completion add up to."""
    reasoning = content = ""
    starts: list[ToolCallStart] = []
    arguments: dict[int, str] = {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning += text
            case ContentDelta(text):
                content += text
            case ToolCallStart():
                starts.append(event)
            case ToolCallArguments(index, text):
                arguments[index] = arguments.get(index, "") + text
    calls = tuple(ToolCall(start.id, start.name, arguments.get(start.index, "")) for start in starts)
    return ParsedMessage(reasoning or None, content or (None if calls else ""), calls)


def new_call_id() -> str:
    return f"call_{secrets.token_urlsafe(18)}"  # 18 bytes make 24 characters


def final_finish_reason(reason: str | None, *, has_tool_calls: bool) -> str | None:
    """The finish reason of the API: "tool_calls" instead of "stop" if there are tool calls; "length" stays "length"."""
    return "tool_calls" if reason == "stop" and has_tool_calls else reason
