"""POST /v1/messages and /v1/messages/count_tokens of the Anthropic API."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import orjson

from nanovllm.server.blocks import BlockDelta, BlockEnd, BlockEvent, BlockStart, ContentBlock, ResponseEnd, block_events
from nanovllm.server.calls import Call
from nanovllm.server.conversation import (
    Conversation,
    PreparedChat,
    can_end_reasoning,
    prepare,
    reasoning_parser,
    render_prompt,
)
from nanovllm.server.errors import ApiError, refuse
from nanovllm.server.http import ErrorFormat, EventStream
from nanovllm.server.parsers import forces_call
from nanovllm.server.parsers.json_object import ObjectScanner
from nanovllm.server.protocol import ApiRequest, Int, NeutralValues, parse_request
from nanovllm.server.sampling import check_stop
from nanovllm.server.service import Service
from nanovllm.server.sse import named_event
from nanovllm.server.structured import constraint
from nanovllm.server.thinking import output_effort, read_thinking

ERROR_TYPES = {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 413: "request_too_large"}


class MessagesRequest(ApiRequest, kw_only=True):
    unsupported: ClassVar[NeutralValues] = {
        "service_tier": ("auto", "standard_only"),
        "mcp_servers": ([],),
        "container": (),
        "context_management": (),
        "output_format": (),
        "speed": ("standard",),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "vllm_xargs": ({},),
    }

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
    output_config: dict[str, Any] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountRequest(MessagesRequest, kw_only=True):
    max_tokens: Int = 1


def _error_body(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else error.type)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


ANTHROPIC_ERRORS = ErrorFormat(body=_error_body, frame=lambda error: named_event("error", _error_body(error)))


async def create_message(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any] | EventStream:
    """Handle a request: the message, or the stream of its events if `stream` is set."""
    request = parse_request(body, MessagesRequest)
    model = service.check_model(request.model)
    check_stop(request.stop_sequences, service.settings, "stop_sequences")
    prepared = await prepare(service, _conversation(request, service))
    if request.stream:
        return _stream_response(service, call, request, prepared, model)
    return await _full_response(service, call, request, prepared, model)


async def count_message_tokens(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any]:
    request = parse_request(body, CountRequest)
    service.check_model(request.model)
    _, token_ids = await render_prompt(service.engine, _conversation(request, service))
    return {"input_tokens": len(token_ids)}


# --- reading the request ----------------------------------------------------------------------------------------------


def _conversation(request: MessagesRequest, service: Service) -> Conversation:
    thinking = read_thinking(
        request.thinking, model_thinks=reasoning_parser(service.settings, service.engine) is not None
    )
    sampling: dict[str, Any] = {"max_tokens": request.max_tokens, "stop": request.stop_sequences}
    for name in ("temperature", "top_p", "top_k"):
        if getattr(request, name) is not None:
            sampling[name] = getattr(request, name)
    if thinking.budget is not None and can_end_reasoning(service.engine):
        sampling["thinking_token_budget"] = thinking.budget
    choice, parallel = _tool_choice(request.tool_choice)
    variables = thinking.template_kwargs | output_effort(request.output_config)
    return Conversation(
        messages=_messages(request),
        sampling=sampling,
        tools=[_tool(tool) for tool in request.tools or []],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        include_reasoning=thinking.is_shown,
        constraint=constraint(_format(request.output_config), None, forced_call=forces_call(choice)),
        template_kwargs=variables | (request.chat_template_kwargs or {}),
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise refuse("tools", f"a tool of type {tool['type']!r} is not supported; only tools with an input_schema are")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """(tool_choice of the OpenAI API, whether several calls are allowed)."""
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


def _format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """`output_config.format` in the form of `response_format` of the OpenAI API."""
    match (config or {}).get("format"):
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    raise refuse("output_config", "format must be {'type': 'json_schema', 'schema': {...}}")


def _messages(request: MessagesRequest) -> list[dict[str, Any]]:
    messages = [] if request.system is None else [{"role": "system", "content": _text(request.system, "system")}]
    for number, message in enumerate(request.messages):
        where = f"messages[{number}]"
        content = message.get("content")
        if message.get("role") not in ("user", "assistant"):
            raise refuse("messages", f"{where}.role must be user or assistant")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise refuse("messages", f"{where}.content must be a string or a list of blocks")
        messages += _turn(message["role"], blocks, where)
    return messages


def _turn(role: str, blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Convert one Anthropic message to OpenAI's messages: one for each tool result, then one for everything else.

    `where` is the message's position in the request, for error messages.
    """
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                reasoning.append(text)
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(arguments)} if (
                role == "assistant"
            ):
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result", "tool_use_id": str(id)} if role == "user":
                content = _text(block.get("content") or "", f"{where}.content")
                results.append({"role": "tool", "tool_call_id": id, "content": content})
            case {"type": str(kind)}:
                raise refuse("messages", f"{where}.content: a block of type {kind!r} is not supported here")
            case _:
                raise refuse("messages", f"{where}.content: every block needs a type")
    turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if reasoning:
        turn["reasoning_content"] = "\n".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn] if texts or reasoning or calls or not results else results


def _text(content: Any, where: str) -> str:
    """The text of a content, which is a string or a list of text blocks."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text", "")) for part in content)
    raise refuse(where.partition("[")[0], f"{where} must be a string or a list of text blocks")


# --- writing the response ---------------------------------------------------------------------------------------------


def _events(
    service: Service, call: Call, request: MessagesRequest, prepared: PreparedChat
) -> AsyncGenerator[BlockEvent, None]:
    return block_events(service, call, prepared, priority=request.priority or 0, cache_salt=request.cache_salt)


async def _full_response(
    service: Service, call: Call, request: MessagesRequest, prepared: PreparedChat, model: str
) -> dict[str, Any]:
    blocks: list[ContentBlock] = []
    end = ResponseEnd("stop", None)
    async with aclosing(_events(service, call, request, prepared)) as events:
        async for event in events:
            if isinstance(event, BlockEnd):
                blocks.append(event.block)
            elif isinstance(event, ResponseEnd):
                end = event
    content = [_content(block) for block in blocks]
    return {**_message(call, model), "content": content, **_stop_reason(end, blocks), "usage": _usage(call)}


async def _stream_response(
    service: Service, call: Call, request: MessagesRequest, prepared: PreparedChat, model: str
) -> EventStream:
    blocks: list[ContentBlock] = []
    started = False
    async with aclosing(_events(service, call, request, prepared)) as events:
        async for event in events:
            if not started:
                started = True
                yield _event("message_start", message={**_message(call, model), "usage": _usage(call)})
            match event:
                case BlockStart(block):
                    blocks.append(block)
                    yield _event("content_block_start", index=block.number, content_block=_content(block))
                case BlockDelta(block, text):
                    yield _event("content_block_delta", index=block.number, delta=_delta(block, text))
                case BlockEnd(block):
                    yield _event("content_block_stop", index=block.number)
                case ResponseEnd():
                    yield _event("message_delta", delta=_stop_reason(event, blocks), usage=_usage(call))
    yield _event("message_stop")


def _event(name: str, **data: Any) -> bytes:
    return named_event(name, {"type": name, **data})


def _message(call: Call, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{call.internal_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _content(block: ContentBlock) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "text":
            return {"type": "text", "text": block.text}
    assert block.call is not None
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; if they were cut, the members that are complete."""
    scanner = ObjectScanner(0)
    scanner.scan(arguments)
    return {name: orjson.loads(arguments[place]) for name, place in scanner.members.items()}


def _delta(block: ContentBlock, text: str) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _stop_reason(end: ResponseEnd, blocks: list[ContentBlock]) -> dict[str, Any]:
    """The fields that say why the message ended."""
    if end.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if any(block.kind == "tool" for block in blocks):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(call: Call) -> dict[str, Any]:
    """Token counts. In the Anthropic API, `input_tokens` does not include the cached tokens of the prompt."""
    return {
        "input_tokens": call.num_prompt_tokens - call.num_cached_tokens,
        "cache_read_input_tokens": call.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": call.num_output_tokens,
    }
