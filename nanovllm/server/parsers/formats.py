"""The formats of tool calls by the names of their parsers. The names are vLLM's, where it has the format."""

from nanovllm.server.parsers.call_format import FORCED_CALL, CallFormat
from nanovllm.server.parsers.gemma import gemma_call
from nanovllm.server.parsers.harmony import HARMONY
from nanovllm.server.parsers.mistral import MistralCalls, new_short_id
from nanovllm.server.parsers.pythonic import pythonic_calls
from nanovllm.server.parsers.tagged import GLM_TAGS, QWEN_TAGS, tagged_call

_QWEN = CallFormat(opener="<tool_call>", bare_start="<function=", closer="</tool_call>", scanner=tagged_call(QWEN_TAGS))
_GLM = CallFormat(opener="<tool_call>", scanner=tagged_call(GLM_TAGS))

TOOL_PARSERS = {
    HARMONY: FORCED_CALL,  # where a grammar leaves no room for channels; harmony.py parses all other completions
    "hermes": CallFormat(opener="<tool_call>", closer="</tool_call>"),
    "llama3_json": CallFormat(opener="<|python_tag|>", separator=";", begins_message=True, arguments_key="parameters"),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "glm45": _GLM,
    "glm47": _GLM,
    "mistral": CallFormat(opener="[TOOL_CALLS]", scanner=MistralCalls, new_id=new_short_id),
    "gemma4": CallFormat(opener="<|tool_call>", closer="<tool_call|>", scanner=gemma_call(quote='<|"|>')),
    "functiongemma": CallFormat(
        opener="<start_function_call>", closer="<end_function_call>", scanner=gemma_call(quote="<escape>")
    ),
    "lfm2": CallFormat(opener="<|tool_call_start|>", scanner=pythonic_calls(closer="<|tool_call_end|>")),
}
