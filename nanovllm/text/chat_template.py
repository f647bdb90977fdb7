"""Render conversations with the model's chat template, in a sandbox and with a limit on the output size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.errors import RequestError

if TYPE_CHECKING:
    import jinja2

    from nanovllm.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

MAX_RENDERED_CHARS = 16 * 2**20


def chat_prompts(
    tokenizer: Tokenizer | None, messages: Sequence[Message] | Sequence[Sequence[Message]], **options: Any
) -> list[dict[str, Any]]:
    """One conversation or several as prompts, each with its text and token ids; `options` as in `render_chat`."""
    if tokenizer is None:
        raise RequestError("skip_tokenizer_init=True: a conversation needs the tokenizer and its chat template")
    if not messages:
        raise RequestError("messages: at least one message is needed")
    prompts = []
    for conversation in [messages] if isinstance(messages[0], Mapping) else messages:
        text = tokenizer.render_chat(conversation, **options)  # type: ignore[arg-type]
        prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
    return prompts


class ChatTemplates:
    """The model's chat templates by name. Each is compiled when it is first used."""

    def __init__(self, sources: Mapping[str, str] | None) -> None:
        self._sources = dict(sources or {})
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, **variables: Any) -> str:
        """Render the template for these variables; `tools` selects the template "tool_use" if there is one."""
        template = self._compile(self._choose(with_tools=variables["tools"] is not None))
        try:
            return _join_bounded(template.generate(**variables))
        except RequestError:
            raise
        except Exception as error:  # a template is a program that comes with the model, and may raise anything
            raise RequestError(
                f"the model's chat template refused these messages: {_describe(error)}; "
                "check the roles, the order and the content of the messages"
            ) from error

    def _choose(self, *, with_tools: bool) -> str:
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self._sources:
                return name
        found = f"only templates named {sorted(self._sources)}" if self._sources else "no chat template"
        raise RequestError(
            f"the model has {found}; put one into chat_template.jinja next to tokenizer.json, "
            "or write the prompt as plain text"
        )

    def _compile(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = _sandbox().from_string(self._sources[name])
            except Exception as error:  # jinja2's own errors, or Python's when it compiles the generated code
                raise RequestError(
                    f"the model's chat template cannot be compiled: {_describe(error)}; "
                    "repair it, or write the prompt as plain text"
                ) from error
        return self._compiled[name]


def render_conversation(
    templates: ChatTemplates,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],  # of the template
) -> str:
    check_chat(messages, tools)
    given = {"documents": None, **variables, "tools": tools}
    if not continue_final_message:
        return templates.render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message=True cannot be combined with add_generation_prompt=True: the first continues "
            "the last message, the second opens a new one; set one of them to False"
        )
    marked, final_text = mark_end_of_final_message(messages)
    rendered = templates.render(messages=marked, add_generation_prompt=False, **given)
    return cut_after_final_message(rendered, final_text)


def _join_bounded(parts: Iterable[str]) -> str:
    """Join the parts, or stop with a RequestError as soon as they exceed MAX_RENDERED_CHARS."""
    kept: list[str] = []
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_RENDERED_CHARS:
            raise RequestError(
                f"the chat template wrote more than {MAX_RENDERED_CHARS} characters; shorten the messages"
            )
        kept.append(part)
    return "".join(kept)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _sandbox() -> jinja2.Environment:
    """The environment that transformers gives templates: they cannot reach Python's internals or change arguments."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training. Here only its body is rendered."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format)


# The trailing space is lost if the template strips the content of messages.
_END_MARK = "[[end-of-final-message]] "


def mark_end_of_final_message(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """A copy of the messages with a marker appended to the text of the last one, and that text without the marker."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _END_MARK}], content
    blocks = list(content) if isinstance(content, Sequence) else []
    for i in reversed(range(len(blocks))):
        if isinstance(blocks[i], Mapping) and isinstance(text := blocks[i].get("text"), str):
            blocks[i] = {**blocks[i], "text": text + _END_MARK}
            return [*before, {**last, "content": blocks}], text
    raise RequestError(
        "continue_final_message=True needs a last message with text in its content; add text, or set it to False"
    )


def cut_after_final_message(rendered: str, final_text: str) -> str:
    """Cut the rendered text at the marker, so that it ends with `final_text`, the text of the last message."""
    end = rendered.rfind(_END_MARK.rstrip())
    if end < 0 or final_text.strip() not in rendered:
        raise RequestError(
            "continue_final_message=True: the model's chat template does not render the last message unchanged, "
            "so it cannot be continued; set it to False"
        )
    return rendered[:end] if rendered.startswith(_END_MARK, end) else rendered[:end].rstrip()


def check_chat(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise a RequestError unless `messages` and `tools` are lists of mappings."""
    if not _is_list_of_mappings(messages) or not messages:
        raise RequestError('messages must be a non-empty list of mappings such as {"role": "user", "content": "Hello"}')
    if tools is not None and not _is_list_of_mappings(tools):
        raise RequestError("tools must be a list of mappings, each the JSON schema of one function")


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)
