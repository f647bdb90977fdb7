"""POST /v1/messages: the Anthropic API's words for a chat."""

from contextlib import aclosing
from typing import Any

import msgspec
import orjson

from nanovllm.server.blocks import Block, Closed, Ended, Grew, Opened, steps
from nanovllm.server.calls import Call
from nanovllm.server.conversation import Conversation, Prepared, prepare
from nanovllm.server.errors import ApiError, refuse
from nanovllm.server.http import Dialect, Frames
from nanovllm.server.protocol import REFUSED, Int, understand
from nanovllm.server.sampling import check_stop
from nanovllm.server.service import Service
from nanovllm.server.sse import named_event

ERROR_TYPES = {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 413: "request_too_large"}


class MessagesRequest(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: Int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    priority: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountRequest(MessagesRequest, kw_only=True):
    max_tokens: Int = 1


REFUSED[MessagesRequest] = REFUSED[CountRequest] = {
    "service_tier": ("auto", "standard_only"),
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
    "output_format": (),
    "output_config": (),
    "speed": ("standard",),
}


def _error_body(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else error.type)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


ANTHROPIC = Dialect(body=_error_body, frame=lambda error: named_event("error", _error_body(error)))


async def create_message(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any] | Frames:
    request = understand(body, MessagesRequest)
    model = service.check_model(request.model)
    check_stop(request.stop_sequences, service.settings, "stop_sequences")
    ready = await prepare(service, _conversation(request))
    if request.stream:
        return _stream(service, call, request, ready, model)
    return await _whole(service, call, request, ready, model)


async def count_message_tokens(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any]:
    request = understand(body, CountRequest)
    service.check_model(request.model)
    return {"input_tokens": len((await prepare(service, _conversation(request))).token_ids)}


# --- what is asked ----------------------------------------------------------------------------------------------------


def _conversation(request: MessagesRequest) -> Conversation:
    sampling: dict[str, Any] = {"max_tokens": request.max_tokens, "stop": request.stop_sequences}
    for name in ("temperature", "top_p", "top_k"):
        if getattr(request, name) is not None:
            sampling[name] = getattr(request, name)
    choice, parallel = _tool_choice(request.tool_choice)
    return Conversation(
        messages=_messages(request),
        sampling=sampling,
        tools=[_tool(tool) for tool in request.tools or []],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        template_kwargs={**_thinking(request.thinking), **(request.chat_template_kwargs or {})},
    )


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any]:
    match thinking:
        case None:
            return {}
        case {"type": "disabled"}:
            return {"enable_thinking": False}
    raise refuse("thinking", "a budget cannot be kept; a model that thinks does so unless the type is 'disabled'")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise refuse("tools", f"a tool of type {tool['type']!r} is not offered; only those with an input_schema are")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    parallel = not (choice or {}).get("disable_parallel_tool_use")
    match choice:
        case None:
            return None, parallel
        case {"type": "auto" | "none" as kind}:
            return kind, parallel
        case {"type": "any"}:
            return "required", parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
    raise refuse("tool_choice", "type must be auto, any, none, or tool with a name")


def _messages(request: MessagesRequest) -> list[dict[str, Any]]:
    messages = [] if request.system is None else [{"role": "system", "content": _text(request.system, "system")}]
    for number, message in enumerate(request.messages):
        place = f"messages[{number}]"
        content = message.get("content")
        if message.get("role") not in ("user", "assistant"):
            raise refuse("messages", f"{place}.role must be user or assistant")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise refuse("messages", f"{place}.content must be a text or a list of blocks")
        messages += _turn(message["role"], blocks, place)
    return messages


def _turn(role: str, blocks: list[Any], place: str) -> list[dict[str, Any]]:
    """One turn as messages: each tool's result is one of its own, before the text."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                thoughts.append(text)
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(arguments)} if (
                role == "assistant"
            ):
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result", "tool_use_id": str(id)} if role == "user":
                content = _text(block.get("content") or "", f"{place}.content")
                results.append({"role": "tool", "tool_call_id": id, "content": content})
            case {"type": str(kind)}:
                raise refuse("messages", f"{place}.content: a block of type {kind!r} cannot stand or be read here")
            case _:
                raise refuse("messages", f"{place}.content: every block needs a type")
    turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn] if texts or thoughts or calls or not results else results


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text", "")) for part in content)
    raise refuse(place.partition("[")[0], f"{place} must be a text or a list of text blocks")


# --- what is answered -------------------------------------------------------------------------------------------------


async def _whole(service: Service, call: Call, request: MessagesRequest, ready: Prepared, model: str) -> dict[str, Any]:
    blocks: list[Block] = []
    ended = Ended("stop", None)
    async with aclosing(steps(service, call, ready, priority=request.priority or 0)) as taken:
        async for step in taken:
            if isinstance(step, Closed):
                blocks.append(step.block)
            elif isinstance(step, Ended):
                ended = step
    content = [_content(block) for block in blocks]
    return {**_message(call, model), "content": content, **_reasons(ended, blocks), "usage": _usage(call)}


async def _stream(service: Service, call: Call, request: MessagesRequest, ready: Prepared, model: str) -> Frames:
    blocks: list[Block] = []
    begun = False
    async with aclosing(steps(service, call, ready, priority=request.priority or 0)) as taken:
        async for step in taken:
            if not begun:
                begun = True
                yield _event("message_start", message={**_message(call, model), "usage": _usage(call)})
            match step:
                case Opened(block):
                    blocks.append(block)
                    yield _event("content_block_start", index=block.number, content_block=_content(block))
                case Grew(block, text):
                    yield _event("content_block_delta", index=block.number, delta=_delta(block, text))
                case Closed(block):
                    yield _event("content_block_stop", index=block.number)
                case Ended():
                    yield _event("message_delta", delta=_reasons(step, blocks), usage=_usage(call))
    yield _event("message_stop")


def _event(name: str, **data: Any) -> bytes:
    return named_event(name, {"type": name, **data})


def _message(call: Call, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{call.unique}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case "thinking":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "text":
            return {"type": "text", "text": block.text}
    assert block.call is not None
    arguments = orjson.loads(block.text) if block.text else {}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "thinking":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _reasons(ended: Ended, blocks: list[Block]) -> dict[str, Any]:
    if ended.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if any(block.kind == "tool" for block in blocks):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(ended.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(call: Call) -> dict[str, Any]:
    """The prompt's cached tokens are not among `input_tokens` here."""
    return {
        "input_tokens": call.num_prompt_tokens - call.num_cached_tokens,
        "cache_read_input_tokens": call.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": call.num_output_tokens,
    }
