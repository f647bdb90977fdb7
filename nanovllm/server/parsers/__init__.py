"""Parse the text that a model generates into messages: reasoning, content and tool calls."""

from nanovllm.server.parsers.chat import ChatParser, check_parsers, make_parser, parse_forced_call
from nanovllm.server.parsers.choice import call_or_content_schema, check_tools, forced_call_schema, forces_call
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
from nanovllm.server.parsers.formats import TOOL_PARSERS
from nanovllm.server.parsers.harmony import HARMONY, OPENS_CONTENT, HarmonyParser, needs_channel, open_message
from nanovllm.server.parsers.reasoning import (
    REASONING_PARSERS,
    THINK_CLOSE,
    THINK_OPEN,
    end_of_reasoning,
    opens_reasoning,
)

__all__ = [
    "HARMONY",
    "OPENS_CONTENT",
    "THINK_CLOSE",
    "THINK_OPEN",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ChatParser",
    "ContentDelta",
    "Event",
    "HarmonyParser",
    "ParsedMessage",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "call_or_content_schema",
    "check_parsers",
    "check_tools",
    "collect",
    "end_of_reasoning",
    "opens_reasoning",
    "final_finish_reason",
    "make_parser",
    "needs_channel",
    "open_message",
    "parse_forced_call",
    "forced_call_schema",
    "forces_call",
]
