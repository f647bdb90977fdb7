"""What a parsed answer consists of: events while it streams, a message once it is whole."""

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
    arguments: str  # a JSON object, as the model wrote it


@dataclass(frozen=True)
class ParsedMessage:
    reasoning: str | None  # None where there is none
    content: str | None  # None where there are only tool calls
    tool_calls: tuple[ToolCall, ...]


def collect(events: Iterable[Event]) -> ParsedMessage:
    """The message that all events of one answer add up to."""
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
    """A regular end with tool calls is "tool_calls"; an answer cut short still says so."""
    return "tool_calls" if reason == "stop" and has_tool_calls else reason
