"""A conversation made ready for the engine: prompt, parameters, and the answer's parser. Every chat API uses it."""

from dataclasses import dataclass, field
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.server.engine import Engine
from nanovllm.server.errors import refuse
from nanovllm.server.parsers import (
    CLOSE,
    OPEN,
    ChatParser,
    check_parsers,
    check_tools,
    ends_in_thinking,
    make_parser,
    tool_grammar,
)
from nanovllm.server.parsers.events import Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from nanovllm.server.prompts import render_chat
from nanovllm.server.sampling import make_params
from nanovllm.server.service import Service
from nanovllm.server.settings import ServerSettings
from nanovllm.server.structured import structured_outputs

# Tokens of a vocabulary that tell how the model writes; the first that is there decides.
TOOL_MARKS = {"<tool_call>": "hermes", "<|python_tag|>": "llama3_json"}
REASONING_MARKS = {"</think>": "qwen3"}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What any of the chat APIs asks for, in the words of none."""

    messages: list[dict[str, Any]]
    sampling: dict[str, Any]  # fields of SamplingParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    constraint: dict[str, Any] = field(default_factory=dict)  # arguments of StructuredOutputs
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    token_ids: list[int]
    params: SamplingParams
    parser: "AnswerParser"


class AnswerParser:
    """Splits answers into thinking, content and tool calls, less what the client does not want."""

    def __init__(
        self,
        parser: ChatParser | None,
        *,
        reasoning: bool,
        parallel_calls: bool,
        tags: tuple[int | None, int | None],  # the tokens that open and close the thinking
    ) -> None:
        self._parser = parser
        self._tags = tags
        self._counter = None if parser is None else parser.counter(*tags)
        self._reasoning = reasoning
        self._parallel_calls = parallel_calls
        self._wants_all = reasoning and parallel_calls

    @property
    def passes_all(self) -> bool:
        """Is everything content, so that nothing need be looked at?"""
        return self._parser is None

    @property
    def passes_rest(self) -> bool:
        """Is all that comes content, whatever came before?"""
        return self._parser is None or self._parser.passes_rest

    def fresh(self) -> "AnswerParser":
        """For one more completion, from its beginning."""
        parser = None if self._parser is None else self._parser.fresh()
        return AnswerParser(parser, reasoning=self._reasoning, parallel_calls=self._parallel_calls, tags=self._tags)

    def feed(self, text: str, *, finished: bool) -> list[Event]:
        assert self._parser is not None
        events = self._parser.feed(text, finished=finished)
        return events if self._wants_all else [event for event in events if self._is_wanted(event)]

    def count_thoughts(self, token_ids: list[int]) -> int:
        """How many of an answer's next tokens are thinking."""
        return 0 if self._counter is None else self._counter.feed(token_ids)

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._reasoning
        if isinstance(event, ToolCallStart | ToolCallArguments):
            return self._parallel_calls or event.index == 0
        return True


async def prepare(service: Service, asked: Conversation) -> Prepared:
    check_tools(asked.tools)
    forced = asked.tool_choice not in (None, "auto", "none")
    constraint = asked.constraint
    if forced and constraint:
        raise refuse("tool_choice", "a call cannot be forced together with a format of the answer; ask for one of them")
    if forced:
        constraint = {"json": tool_grammar(asked.tools, asked.tool_choice)}
    text, token_ids = await render_chat(
        service.engine,
        asked.messages,
        tools=None if asked.tool_choice == "none" else asked.tools,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        add_special_tokens=asked.add_special_tokens,
        template_kwargs=asked.template_kwargs,
    )
    parser = _parser(service, asked, text, constrained=bool(constraint))
    structured = {"structured_outputs": structured_outputs(constraint)} if constraint else {}
    return Prepared(
        token_ids,
        make_params(**asked.sampling, **structured),
        AnswerParser(
            parser,
            reasoning=asked.include_reasoning,
            parallel_calls=asked.parallel_tool_calls,
            tags=(_token_id(service.engine, OPEN), _token_id(service.engine, CLOSE)),
        ),
    )


def _parser(service: Service, asked: Conversation, prompt: str, *, constrained: bool) -> ChatParser | None:
    """None where all of an answer is content. What is written under a grammar holds no thinking."""
    settings, engine = service.settings, service.engine
    reasoning = None if constrained else reasoning_parser(settings, engine)
    if reasoning is None and not asked.tools and asked.tool_choice in (None, "none"):
        return None
    return make_parser(
        reasoning=reasoning,
        tools=tool_parser(settings, engine),
        tool_schemas=asked.tools,
        tool_choice=asked.tool_choice,
        prompt_ends_in_thinking=ends_in_thinking(prompt),
    )


def check_settings(settings: ServerSettings) -> None:
    """Refuse unknown formats when the server starts, not when the first tool is asked for."""
    check_parsers(reasoning=settings.reasoning_parser, tools=settings.tool_call_parser)


def tool_parser(settings: ServerSettings, engine: Engine) -> str | None:
    return settings.tool_call_parser or _marked(engine, TOOL_MARKS)


def reasoning_parser(settings: ServerSettings, engine: Engine) -> str | None:
    return settings.reasoning_parser or _marked(engine, REASONING_MARKS)


def _marked(engine: Engine, marks: dict[str, str]) -> str | None:
    return next((name for mark, name in marks.items() if _token_id(engine, mark) is not None), None)


def _token_id(engine: Engine, token: str) -> int | None:
    return None if engine.tokenizer is None else engine.tokenizer.backend.token_to_id(token)
