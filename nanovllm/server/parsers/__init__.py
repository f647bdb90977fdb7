"""From the text a model writes to messages: thinking, content and tool calls."""

from nanovllm.server.parsers.chat import ChatParser, check_parsers, make_parser, parse_forced
from nanovllm.server.parsers.choice import check_tools, tool_grammar
from nanovllm.server.parsers.events import (
    ContentDelta,
    Event,
    ParsedMessage,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    collect,
    final_finish_reason,
)
from nanovllm.server.parsers.reasoning import CLOSE, OPEN, REASONING_PARSERS, ends_in_thinking
from nanovllm.server.parsers.tools import TOOL_PARSERS

__all__ = [
    "CLOSE",
    "OPEN",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ChatParser",
    "ContentDelta",
    "Event",
    "ParsedMessage",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "check_parsers",
    "check_tools",
    "collect",
    "ends_in_thinking",
    "final_finish_reason",
    "make_parser",
    "parse_forced",
    "tool_grammar",
]
