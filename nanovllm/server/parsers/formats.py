"""The formats of tool calls by the names of their parsers. The names are vLLM's, where it has the format."""

from nanovllm.server.parsers.call_format import FORCED_CALL, CallFormat
from nanovllm.server.parsers.harmony import HARMONY

TOOL_PARSERS = {
    HARMONY: FORCED_CALL,  # where a grammar leaves no room for channels; harmony.py parses all other completions
    "hermes": CallFormat(opener="<tool_call>", closer="</tool_call>"),
    "llama3_json": CallFormat(opener="<|python_tag|>", separator=";", begins_message=True, arguments_key="parameters"),
}
