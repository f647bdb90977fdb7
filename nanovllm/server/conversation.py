"""Prepare a conversation for the engine: prompt tokens, sampling parameters and output parser. All chat APIs use it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nanovllm.engine.thinking import closing_token
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.engine import Engine
from nanovllm.server.errors import refuse
from nanovllm.server.parsers import (
    HARMONY,
    OPENS_CONTENT,
    ChatParser,
    HarmonyParser,
    call_or_content_schema,
    check_parsers,
    check_tools,
    end_of_reasoning,
    forced_call_schema,
    forces_call,
    make_parser,
    needs_channel,
    open_message,
    opens_reasoning,
)
from nanovllm.server.parsers.choice import call_format
from nanovllm.server.parsers.events import Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from nanovllm.server.prompts import render_chat, require_tokenizer
from nanovllm.server.sampling import make_params
from nanovllm.server.service import Service
from nanovllm.server.settings import ServerSettings
from nanovllm.server.structured import structured_outputs
from nanovllm.server.truncation import Truncation
from nanovllm.structured.exact import json_or_call

# Tag -> parser: the first of these tags in the chat template, or else in the vocabulary, selects the parser, unless an
# option names one. Several formats have <tool_call>; the other tags tell them apart.
TOOL_PARSER_TOKENS = {
    "<|channel|>": HARMONY,
    "<parameter=": "qwen3_coder",
    "<arg_key>": "glm45",
    "[TOOL_CALLS]": "mistral",
    "<|tool_call>": "gemma4",
    "<start_function_call>": "functiongemma",
    "<|tool_call_start|>": "lfm2",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
}
REASONING_PARSER_TOKENS = {"<|channel|>": HARMONY, "<|channel>": "gemma4", "[/THINK]": "mistral", "</think>": "qwen3"}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A chat request in a form that is independent of the API it came through."""

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
    truncation: Truncation | None = None


@dataclass(frozen=True)
class PreparedChat:
    """A chat request as the engine takes it, and the parser for its completions."""

    text: str  # the rendered prompt
    token_ids: list[int]  # of the text, or a part of them if the prompt was truncated
    params: SamplingParams
    parser: "OutputParser"  # a prototype: each completion parses with a `new_copy`


class OutputParser:
    """Splits a completion into reasoning, content and tool calls, and drops the parts that the client does not want."""

    def __init__(
        self,
        parser: ChatParser | HarmonyParser | None,
        *,
        reasoning: bool,
        parallel_calls: bool,
        token_id: Callable[[str], int | None],  # from the text of a token to its id
    ) -> None:
        self._parser = parser
        self._token_id = token_id
        self._counter = None if parser is None else parser.counter(token_id)
        self._reasoning = reasoning
        self._parallel_calls = parallel_calls
        self._wants_all = reasoning and parallel_calls

    @property
    def is_content_only(self) -> bool:
        """True if all text is content, so that nothing needs to be parsed."""
        return self._parser is None

    @property
    def rest_is_content(self) -> bool:
        """True if all text from here on is content."""
        return self._parser is None or self._parser.rest_is_content

    def new_copy(self) -> "OutputParser":
        """A parser in its initial state, for another completion of the request."""
        parser = None if self._parser is None else self._parser.new_copy()
        settings = {"reasoning": self._reasoning, "parallel_calls": self._parallel_calls}
        return OutputParser(parser, token_id=self._token_id, **settings)

    def feed(self, text: str, *, finished: bool) -> list[Event]:
        """The events that the next piece of text completes; with `finished`, also those still held back."""
        assert self._parser is not None
        events = self._parser.feed(text, finished=finished)
        return events if self._wants_all else [event for event in events if self._is_wanted(event)]

    def count_reasoning_tokens(self, token_ids: list[int]) -> int:
        """How many of the completion's next tokens are reasoning."""
        return 0 if self._counter is None else self._counter.feed(token_ids)

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._reasoning
        if isinstance(event, ToolCallStart | ToolCallArguments):
            return self._parallel_calls or event.index == 0
        return True


async def prepare(service: Service, chat: Conversation) -> PreparedChat:
    """Check the tools, render and tokenize the prompt, and make the sampling parameters and the parser."""
    check_tools(chat.tools)  # before a schema is made of them
    constraint = chat.constraint
    if forces_call(chat.tool_choice):
        if constraint:
            raise refuse("tool_choice", "a forced call cannot be combined with structured outputs; use one of them")
        constraint = {"json": forced_call_schema(chat.tools, chat.tool_choice)}
    elif constraint and chat.tools and chat.tool_choice != "none":
        constraint = _call_or_content(constraint, service, chat)
    text, token_ids = await render_prompt(service.engine, chat)
    if constraint and (opening := _opening_of_content(service, text)):  # the grammar leaves no room for it
        text += opening
        token_ids = token_ids + require_tokenizer(service.engine).encode(opening, add_special_tokens=False)
    parser = _parser(service, chat, text, constraint)
    structured = {"structured_outputs": structured_outputs(constraint)} if constraint else {}
    params = make_params(**chat.sampling, **structured)
    if parser is not None and _has_special_token(service.engine, parser.tags):
        params = replace(params, skip_special_tokens=False)
    return PreparedChat(
        text,
        token_ids,
        params,
        OutputParser(
            parser,
            reasoning=chat.include_reasoning,
            parallel_calls=chat.parallel_tool_calls,
            token_id=partial(_token_id, service.engine),
        ),
    )


def _call_or_content(constraint: dict[str, Any], service: Service, chat: Conversation) -> dict[str, Any]:
    """The constraint of the content, widened so that the model may call a tool instead: in its own format if a token
    begins calls in it, else as in a forced call."""
    (kind,) = constraint
    if kind not in ("json", "json_object"):
        raise refuse(
            "tool_choice", f'"auto" cannot be combined with a {kind}; set "none", or give a JSON schema instead'
        )
    schema = {"type": "object"}
    if kind == "json":
        checked = structured_outputs(constraint)
        assert checked is not None and isinstance(checked.json, str)
        schema = json.loads(checked.json)
    format = call_format(tool_parser(service.settings, service.engine))
    opener, closer = (_token_id(service.engine, tag) for tag in (format.opener, format.closer))
    if opener is None or format.begins_message:
        return {"json": call_or_content_schema(schema, chat.tools)}
    call = forced_call_schema(chat.tools, "required") if format.is_json else None
    return {"grammar": json_or_call(schema, opener, call, closer)}


async def render_prompt(engine: Engine, chat: Conversation) -> tuple[str, list[int]]:
    """Check the tools and render the prompt; return its text and its token ids."""
    check_tools(chat.tools)
    return await render_chat(
        engine,
        chat.messages,
        tools=None if chat.tool_choice == "none" else chat.tools,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        add_special_tokens=chat.add_special_tokens,
        template_kwargs=chat.template_kwargs,
        truncation=chat.truncation,
    )


def _opening_of_content(service: Service, prompt: str) -> str:
    """What the model would write between the prompt and the content if it did not reason."""
    if reasoning_parser(service.settings, service.engine) == HARMONY:
        return OPENS_CONTENT if needs_channel(prompt) else ""
    return end_of_reasoning(prompt)


def _parser(
    service: Service, chat: Conversation, prompt: str, constraint: dict[str, Any]
) -> ChatParser | HarmonyParser | None:
    """The parser for this request; None if all text is content. Text that follows a grammar has no reasoning."""
    settings, engine = service.settings, service.engine
    reasoning = None if constraint else reasoning_parser(settings, engine)
    if reasoning is None and not chat.tools and chat.tool_choice in (None, "none"):
        return None
    return make_parser(
        reasoning=reasoning,
        tools=tool_parser(settings, engine),
        tool_schemas=chat.tools,
        tool_choice=chat.tool_choice,
        prompt_opens_reasoning=opens_reasoning(prompt),
        begun=open_message(prompt),
        is_object="json" in constraint,
    )


def check_settings(settings: ServerSettings) -> None:
    """Raise a ConfigError for unknown parser names, so that the server refuses them at startup."""
    check_parsers(reasoning=settings.reasoning_parser, tools=settings.tool_call_parser)


def tool_parser(settings: ServerSettings, engine: Engine) -> str | None:
    """The name of the tool parser: the option, else by the tag in the chat template or in the vocabulary.

    None if there is neither: then a call is the JSON object that forced calls are.
    """
    if settings.tool_call_parser is not None or engine.tokenizer is None:
        return settings.tool_call_parser
    by_template = (name for tag, name in TOOL_PARSER_TOKENS.items() if engine.tokenizer.chat_template_has(tag))
    return next(by_template, None) or _parser_by_vocabulary(engine, TOOL_PARSER_TOKENS)


def reasoning_parser(settings: ServerSettings, engine: Engine) -> str | None:
    """The name of the reasoning parser: the option, else by the vocabulary."""
    return settings.reasoning_parser or _parser_by_vocabulary(engine, REASONING_PARSER_TOKENS)


def _parser_by_vocabulary(engine: Engine, parsers: dict[str, str]) -> str | None:
    return next((name for token, name in parsers.items() if _token_id(engine, token) is not None), None)


def _has_special_token(engine: Engine, texts: Iterable[str]) -> bool:
    """True if one of the texts is a token that is left out of the generated text by default."""
    return engine.tokenizer is not None and not engine.tokenizer.all_special_ids.isdisjoint(
        _token_id(engine, text) for text in texts
    )


def can_end_reasoning(engine: Engine) -> bool:
    """True if the engine knows the token that ends the model's reasoning, and generates it when a budget is used."""
    return engine.tokenizer is not None and closing_token(engine.tokenizer) is not None


def _token_id(engine: Engine, token: str) -> int | None:
    return None if engine.tokenizer is None else engine.tokenizer.backend.token_to_id(token)
