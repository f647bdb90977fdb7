"""From what a client sends to token ids: text, token ids, and conversations through the model's chat template."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson

from nanovllm.server.engine import Engine
from nanovllm.server.errors import ApiError, refuse
from nanovllm.text.tokenizer import Tokenizer

Result = TypeVar("Result")
QUICK_CHARS = 8_000  # of text: tokenized within a few milliseconds; more is given to a thread
CHARS_AROUND_MESSAGE = 32  # that a template may write
MAX_TEMPLATE_KWARGS = 64
MAX_CHARS_PER_TOKEN = 256  # generous: a text longer than this for every token that fits cannot fit


def tokenizer_of(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise ApiError(400, "this server has no tokenizer: send token ids to /v1/completions", code="no_tokenizer")
    return engine.tokenizer


async def aside(size: int, work: Callable[[], Result]) -> Result:
    """Do what takes long beside the loop, so that other requests need not wait for it."""
    return work() if size <= QUICK_CHARS else await asyncio.to_thread(work)


# --- text and token ids -----------------------------------------------------------------------------------------------


async def read_prompts(
    engine: Engine, prompts: Any, *, field: str, add_special_tokens: bool, max_prompts: int
) -> list[list[int]]:
    """One prompt or several, each a text or a list of token ids."""
    items = as_list(prompts, field)
    if len(items) > max_prompts:
        raise refuse(field, f"{len(items)} prompts; at most {max_prompts} are taken in one request")
    size = sum(len(item) for item in items if isinstance(item, str))
    read = await aside(size, lambda: [_read_prompt(engine, item, field, add_special_tokens) for item in items])
    for token_ids in read:
        _check_tokens(engine, token_ids, field)
    return read


def as_list(prompts: Any, field: str) -> list[Any]:
    """The prompts one by one, each still as it was sent."""
    if isinstance(prompts, str):
        return [prompts]
    kinds = set(map(type, prompts))
    if kinds == {int}:
        return [prompts]
    if len(kinds) != 1:
        raise refuse(field, "must be a text, a list of texts, a list of token ids, or a list of lists of token ids")
    return list(prompts)


def _read_prompt(engine: Engine, prompt: Any, field: str, add_special_tokens: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    check_length(engine, len(prompt), field)
    return tokenizer_of(engine).encode(prompt, add_special_tokens)


def _check_tokens(engine: Engine, token_ids: list[int], field: str) -> None:
    if not token_ids:
        raise refuse(field, "is empty")
    check_context(engine, len(token_ids), field)


def check_length(engine: Engine, num_chars: int, field: str) -> None:
    """Refuse what is hopelessly long before work is put into it."""
    if num_chars > engine.max_model_len * MAX_CHARS_PER_TOKEN:
        raise _too_long(engine, f"{num_chars} characters", field)


def check_context(engine: Engine, num_tokens: int, field: str) -> None:
    if num_tokens >= engine.max_model_len:
        raise _too_long(engine, f"{num_tokens} tokens", field)


def _too_long(engine: Engine, told: str, field: str) -> ApiError:
    return ApiError(
        400,
        f"{field}: {told} leave no room for an answer within the {engine.max_model_len} tokens that fit",
        param=field,
        code="context_length_exceeded",
    )


# --- conversations ----------------------------------------------------------------------------------------------------


async def render_chat(
    engine: Engine,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    template_kwargs: dict[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """The conversation as the template writes it, and its token ids."""
    tokenizer = tokenizer_of(engine)
    if len(messages) > engine.max_model_len:
        raise _too_long(engine, f"{len(messages)} messages", "messages")
    plain = plain_messages(messages)
    size = sum(len(message["content"]) for message in plain)
    check_length(engine, size, "messages")
    extra = template_kwargs or {}
    if len(extra) > MAX_TEMPLATE_KWARGS:
        raise refuse("chat_template_kwargs", f"{len(extra)} entries; at most {MAX_TEMPLATE_KWARGS} are taken")
    for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in extra:
            raise refuse("chat_template_kwargs", f"{name} cannot be set here")

    def render() -> tuple[str, list[int]]:
        text = tokenizer.render_chat(
            plain,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **extra,
        )
        check_length(engine, len(text), "messages")
        return text, tokenizer.encode(text, add_special_tokens)

    text, token_ids = await aside(size + CHARS_AROUND_MESSAGE * len(plain), render)
    if not token_ids:
        raise refuse("messages", "the chat template made nothing of them")
    check_context(engine, len(token_ids), "messages")
    return text, token_ids


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content is text, and a tool call's arguments are an object."""
    if not messages:
        raise refuse("messages", "at least one message is needed")
    return [_plain_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise refuse("messages", f"{place} has no role")
    plain = {name: value for name, value in message.items() if value is not None and name != "refusal"}
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _plain_content(message.get("content"), place)
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
    if "tool_calls" in plain:
        plain["tool_calls"] = _plain_calls(plain["tool_calls"], place)
    for name in ("audio", "function_call"):
        if name in plain:
            raise refuse("messages", f"{place}.{name} is not read by this server")
    return plain


def _plain_content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse("messages", f"{place}.content must be a text or a list of parts")
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": str(kind)}:
                raise refuse("messages", f"{place}.content: a part of type {kind!r} is not read; this model reads text")
            case _:
                raise refuse("messages", f"{place}.content: every part needs a type, and a text part its text")
    return "\n".join(texts)


def _plain_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise refuse("messages", f"{place}.tool_calls must be a list")
    return [_plain_call(call, place) for call in calls]


def _plain_call(call: Any, place: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name)} as function}:
            arguments = function.get("arguments") or {}
        case _:
            raise refuse("messages", f"{place}.tool_calls: every call needs a function with a name")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            raise refuse("messages", f"{place}.tool_calls: the arguments of {name!r} are not valid JSON") from None
    if not isinstance(arguments, dict):
        raise refuse("messages", f"{place}.tool_calls: the arguments of {name!r} must be a JSON object")
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}
