"""Turn the prompts of requests into token ids: text, token ids, and conversations through the chat template."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from nanovllm.server.engine import Engine
from nanovllm.server.errors import ApiError, refuse
from nanovllm.server.truncation import Truncation
from nanovllm.text.tokenizer import Tokenizer

Result = TypeVar("Result")
MAX_CHARS_ON_EVENT_LOOP = 8_000  # tokenized within a few milliseconds; longer text is processed in a thread
CHARS_AROUND_MESSAGE = 32  # an estimate of what a template adds to each message
MAX_TEMPLATE_KWARGS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHARS_PER_TOKEN = 256  # a text with more characters per token of the context length is refused without tokenizing


def require_tokenizer(engine: Engine) -> Tokenizer:
    """The engine's tokenizer, or an error for the client if there is none."""
    if engine.tokenizer is None:
        raise ApiError(400, "this server has no tokenizer: send token ids to /v1/completions", code="no_tokenizer")
    return engine.tokenizer


async def run_in_thread_if_long(size: int, work: Callable[[], Result]) -> Result:
    """Run `work`, in a thread if `size` (characters) is large, so that it does not block the event loop."""
    return work() if size <= MAX_CHARS_ON_EVENT_LOOP else await asyncio.to_thread(work)


# --- text and token ids -----------------------------------------------------------------------------------------------


async def read_prompts(
    engine: Engine,
    prompts: Any,
    *,
    field: str,
    add_special_tokens: bool,
    max_prompts: int,
    is_completed: bool = True,
    truncation: Truncation | None = None,
) -> list[list[int]]:
    """The token ids of one prompt or several, each a string or a list of token ids.

    `field` is for error messages. `is_completed`: a prompt must leave room for a completion.
    """
    items = as_list(prompts, field)
    if len(items) > max_prompts:
        raise refuse(field, f"{len(items)} prompts; a request may have at most {max_prompts}")
    size = sum(len(item) for item in items if isinstance(item, str))
    names = [field] if len(items) == 1 else [f"{field}[{number}]" for number in range(len(items))]
    limit = PromptLimit(engine.max_model_len, is_completed=is_completed)

    def read_all() -> list[list[int]]:
        return [
            _read_prompt(engine, item, limit, name, add_special_tokens) for item, name in zip(items, names, strict=True)
        ]

    read = await run_in_thread_if_long(size, read_all)
    if truncation is not None:
        read = [truncation.apply(token_ids) for token_ids in read]
    for token_ids, name in zip(read, names, strict=True):
        if not token_ids:
            raise ApiError(400, f"{name}: must not be empty", param=field)
        limit.check_tokens(len(token_ids), name)
    return read


def as_list(prompts: Any, field: str) -> list[Any]:
    """A list of the prompts, each in the form in which it was sent."""
    if isinstance(prompts, str):
        return [prompts]
    kinds = set(map(type, prompts))
    if kinds == {int}:
        return [prompts]
    if len(kinds) != 1:
        raise refuse(field, "must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    return list(prompts)


def _read_prompt(engine: Engine, prompt: Any, limit: "PromptLimit", field: str, add_special_tokens: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    limit.check_chars(len(prompt), field)
    return require_tokenizer(engine).encode(prompt, add_special_tokens)


@dataclass(frozen=True)
class PromptLimit:
    """How long a prompt may be. `is_completed`: at least one token must be left for its completion."""

    max_model_len: int
    is_completed: bool = True

    def check_chars(self, num_chars: int, field: str) -> None:
        """Refuse a text that cannot fit into the context length, before it is tokenized."""
        if num_chars > self.max_model_len * MAX_CHARS_PER_TOKEN:
            raise self.too_long(f"{num_chars} characters", field)

    def check_tokens(self, num_tokens: int, field: str) -> None:
        if num_tokens > self.max_model_len - self.is_completed:
            raise self.too_long(f"{num_tokens} tokens", field)

    def too_long(self, size: str, field: str) -> ApiError:
        problem = "leave no room for a completion within" if self.is_completed else "are longer than"
        return ApiError(
            400,
            f"{field}: {size} {problem} the maximum length of {self.max_model_len} tokens",
            param=field.partition("[")[0],
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
    truncation: Truncation | None = None,
) -> tuple[str, list[int]]:
    """Render a conversation with the chat template; return the text and its token ids, which may be truncated."""
    tokenizer = require_tokenizer(engine)
    limit = PromptLimit(engine.max_model_len)
    if len(messages) > engine.max_model_len:
        raise limit.too_long(f"{len(messages)} messages", "messages")
    plain = normalize_messages(messages)
    if tokenizer.chat_template_has("message.thinking"):
        plain = [_with_thinking(message) for message in plain]
    size = sum(len(message["content"]) for message in plain)
    limit.check_chars(size, "messages")
    extra = template_kwargs or {}
    if len(extra) > MAX_TEMPLATE_KWARGS:
        raise refuse("chat_template_kwargs", f"{len(extra)} entries; at most {MAX_TEMPLATE_KWARGS} are accepted")
    for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in extra:
            raise refuse("chat_template_kwargs", f"{name} is a reserved name and cannot be set here")

    def render() -> tuple[str, list[int]]:
        text = tokenizer.render_chat(
            plain,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **extra,
        )
        limit.check_chars(len(text), "messages")
        return text, tokenizer.encode(text, add_special_tokens)

    text, token_ids = await run_in_thread_if_long(size + CHARS_AROUND_MESSAGE * len(plain), render)
    if not token_ids:
        raise refuse("messages", "the chat template rendered them to an empty prompt")
    if truncation is not None:
        token_ids = truncation.apply(token_ids)
    limit.check_tokens(len(token_ids), "messages")
    return text, token_ids


def normalize_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to the form that templates expect: content is a string, arguments of tool calls are objects."""
    if not messages:
        raise refuse("messages", "at least one message is needed")
    return [_normalize_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _normalize_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """`where` is the message's position in the request, for error messages."""
    role = message.get("role")
    if role not in ROLES:
        found = "has no role" if role is None else f"has the role {role!r}"
        raise refuse("messages", f"{where} {found}; it must be one of {', '.join(ROLES)}")
    plain = {name: value for name, value in message.items() if value is not None and name != "refusal"}
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _normalize_content(message.get("content"), where)
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
    if "tool_calls" in plain:
        plain["tool_calls"] = _normalize_calls(plain["tool_calls"], where)
    for name in ("audio", "function_call"):
        if name in plain:
            raise refuse("messages", f"{where}.{name} is not supported")
    return plain


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """With the reasoning under gpt-oss' name for it. Its template refuses it beside content in a message with calls."""
    if "reasoning_content" not in message or (message.get("tool_calls") and message["content"]):
        return message
    return {"thinking": message["reasoning_content"], **message}


def _normalize_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse("messages", f"{where}.content must be a string or a list of parts")
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": str(kind)}:
                raise refuse(
                    "messages", f"{where}.content: a part of type {kind!r} is not supported; this model reads only text"
                )
            case _:
                raise refuse("messages", f"{where}.content: every part needs a type, and a text part its text")
    return "\n".join(texts)


def _normalize_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise refuse("messages", f"{where}.tool_calls must be a list")
    return [_normalize_call(call, where) for call in calls]


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name)} as function}:
            arguments = function.get("arguments") or {}
        case _:
            raise refuse("messages", f"{where}.tool_calls: every call needs a function with a name")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            raise refuse("messages", f"{where}.tool_calls: the arguments of {name!r} are not valid JSON") from None
    if not isinstance(arguments, dict):
        raise refuse("messages", f"{where}.tool_calls: the arguments of {name!r} must be a JSON object")
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}
