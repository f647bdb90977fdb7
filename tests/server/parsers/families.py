"""The families whose calls and reasoning have their own formats: parsers, templates, and what assistants write."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm.server.parsers import ChatParser, make_parser, opens_reasoning
from nanovllm.text.chat_template import ChatTemplates

PROPERTIES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "o": {"type": "object"},
    "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g_2")]
QUESTION = {"role": "user", "content": "Well?"}


@dataclass(frozen=True)
class Family:
    """`end`: what the template writes after a message of the assistant. `special`: tags that are special tokens."""

    name: str  # of the template
    tools: str
    reasoning: str | None
    end: str
    special: tuple[str, ...] = ()

    @cached_property
    def source(self) -> str:
        return (Path(__file__).parent / "data" / f"{self.name}.jinja").read_text().rstrip("\n")

    @cached_property
    def templates(self) -> ChatTemplates:
        return ChatTemplates({"default": self.source})

    @cached_property
    def prompt(self) -> str:
        return self.templates.render(messages=[QUESTION], tools=TOOLS, add_generation_prompt=True)

    def parser(self) -> ChatParser:
        made = make_parser(
            reasoning=self.reasoning,
            tools=self.tools,
            tool_schemas=TOOLS,
            tool_choice="auto",
            prompt_opens_reasoning=opens_reasoning(self.prompt),
        )
        assert isinstance(made, ChatParser)
        return made

    def write(self, reasoning: str, content: str, calls: list[tuple[str, Any]]) -> str:
        """The completion with which an assistant would write this message."""
        function_calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ]
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        message |= {"tool_calls": function_calls} if calls else {}
        whole = self.templates.render(messages=[QUESTION, message], tools=TOOLS, add_generation_prompt=False)
        assert whole.startswith(self.prompt) and whole.endswith(self.end)
        return whole.removeprefix(self.prompt).removesuffix(self.end)


QWEN = Family("qwen3_5", "qwen3_coder", "qwen3", "<|im_end|>\n")
GLM = Family("glm", "glm45", "glm45", "")
MISTRAL = Family("mistral", "mistral", "mistral", "", ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"))
GEMMA = Family(
    "gemma4",
    "gemma4",
    "gemma4",
    "<turn|>\n",
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>"),
)
LFM = Family("lfm2", "lfm2", None, "<|im_end|>\n", ("<|tool_call_start|>", "<|tool_call_end|>"))
FAMILIES = [QWEN, GLM, MISTRAL, GEMMA, LFM]
