"""POST /v1/responses of the OpenAI API, stateless: every request has the whole conversation."""

from contextlib import aclosing
from itertools import count
from typing import Any, ClassVar

from nanovllm.server.blocks import BlockDelta, BlockEnd, BlockStart, ContentBlock, ResponseEnd, block_events
from nanovllm.server.calls import Call
from nanovllm.server.conversation import Conversation, PreparedChat, prepare
from nanovllm.server.errors import refuse
from nanovllm.server.http import EventStream
from nanovllm.server.parsers import forces_call
from nanovllm.server.protocol import GenerationRequest, Int, NeutralValues, parse_request
from nanovllm.server.sampling import sampling_fields
from nanovllm.server.service import Service
from nanovllm.server.sse import named_event
from nanovllm.server.structured import constraint
from nanovllm.server.thinking import check_reasoning


class ResponsesRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[NeutralValues] = {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "store": (False,),
        "background": (False,),
        "include": ([],),
        "truncation": ("disabled",),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "service_tier": ("auto", "default"),
        "n": (1,),
        "max_tokens": (),
        "response_format": (),
        "prompt_logprobs": (),
        "logprob_token_ids": ([],),
        "return_token_ids": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "context_management": ([],),
        "enable_response_messages": (False,),
        "previous_input_messages": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "vllm_xargs": ({},),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "add_special_tokens": (False,),
        "return_tokens_as_token_ids": (False,),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "stream_interval": (1,),
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def create_response(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any] | EventStream:
    """Handle a request: the response object, or the stream of its events if `stream` is set."""
    request = parse_request(body, ResponsesRequest)
    model = service.check_model(request.model)
    request.stream_options = None
    prepared = await prepare(service, _conversation(request, service))
    responder = ResponsesResponder(service, call, request, prepared, model)
    return responder.stream() if request.stream else await responder.full()


# --- reading the request ----------------------------------------------------------------------------------------------


def _conversation(request: ResponsesRequest, service: Service) -> Conversation:
    sampling = sampling_fields(request, service.settings) | {"max_tokens": request.max_output_tokens}
    tool_choice = _tool_choice(request.tool_choice)
    return Conversation(
        messages=_messages(request),
        sampling=sampling,
        tools=[_tool(tool) for tool in request.tools or []],
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        include_reasoning=request.include_reasoning is not False,
        constraint=constraint(
            _format(request.text),
            request.structured_outputs,
            grammar=request.grammar,
            json_schema=request.json_schema,
            forced_call=forces_call(tool_choice),
        ),
        template_kwargs=check_reasoning(request.reasoning) | (request.chat_template_kwargs or {}),
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise refuse("tools", f"a tool of type {tool.get('type')!r} is not supported; only functions are")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case dict():
            raise refuse("tool_choice", "must be auto, none, required, or the name of a function")
    return choice


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in the form of `response_format` of the chat API."""
    if text and text.get("verbosity") not in (None, "medium"):
        raise refuse("text", "verbosity: is not supported; only medium is accepted")
    match (text or {}).get("format"):
        case {"type": "json_schema", **rest}:
            return {"type": "json_schema", "json_schema": rest}
        case dict(other):
            return other
    return None


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for number, item in enumerate(request.input):
        _add_item(messages, item, f"input[{number}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add one input item to the messages. Reasoning and tool calls become part of the assistant's current message.

    `where` is the item's position in the request, for error messages.
    """
    match item:
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": str(id), "output": output}:
            messages.append({"role": "tool", "tool_call_id": id, "content": _text(output, where)})
        case {"type": "reasoning"}:
            reasoning = _text(item.get("content") or "", where)
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
        case {"role": "assistant", "content": content}:
            message = _assistant(messages)
            message["content"] = "\n".join(filter(None, [message["content"], _text(content, where)]))
        case {"role": "user" | "system" | "developer" as role, "content": content}:
            messages.append({"role": role, "content": _text(content, where)})
        case {"role": role, "content": _}:
            raise refuse("input", f"{where} has the role {role!r}; it must be user, assistant, system or developer")
        case _:
            raise refuse("input", f"{where}: an item of type {item.get('type')!r} is not supported, or lacks a field")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message if it is the assistant's, else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    """The text of an item's content, which is a string or a list of text parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": "input_text" | "output_text" | "reasoning_text" | "text", "text": str(text)}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise refuse("input", f"{where}: a part of type {kind!r} is not supported; this model reads only text")
    return "\n".join(texts)


# --- writing the response ---------------------------------------------------------------------------------------------


class ResponsesResponder:
    """Writes the response to one request, as one JSON object or as a stream of events."""

    def __init__(
        self, service: Service, call: Call, request: ResponsesRequest, prepared: PreparedChat, model: str
    ) -> None:
        self._call = call
        self._request = request
        self._prepared = prepared
        self._model = model
        self._sequence_numbers = count()
        self._items: list[dict[str, Any]] = []
        self._events = block_events(
            service, call, prepared, priority=request.priority or 0, cache_salt=request.cache_salt
        )

    async def full(self) -> dict[str, Any]:
        """Wait for the completion and return the response object."""
        end = ResponseEnd("stop", None)
        async with aclosing(self._events) as events:
            async for event in events:
                if isinstance(event, BlockEnd):
                    self._items.append(self._item(event.block, "completed"))
                elif isinstance(event, ResponseEnd):
                    end = event
        return self._response(end)

    async def stream(self) -> EventStream:
        """Yield the API's events. The first two are sent when the engine has accepted the request."""
        started = False
        async with aclosing(self._events) as events:
            async for event in events:
                if not started:
                    started = True
                    yield self._event("response.created", response=self._response(None))
                    yield self._event("response.in_progress", response=self._response(None))
                match event:
                    case BlockStart(block):
                        yield self._open(block)
                    case BlockDelta(block, text):
                        yield self._grow(block, text)
                    case BlockEnd(block):
                        yield self._close(block)
                    case ResponseEnd(reason):
                        kind = "incomplete" if reason == "length" else "completed"
                        yield self._event(f"response.{kind}", response=self._response(event))

    # --- events -------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **data: Any) -> bytes:
        return named_event(kind, {"type": kind, "sequence_number": next(self._sequence_numbers), **data})

    def _open(self, block: ContentBlock) -> bytes:
        item = self._item(block, "in_progress")
        frames = self._event("response.output_item.added", output_index=block.number, item=item)
        if block.kind != "tool":
            frames += self._event("response.content_part.added", **self._position(block), part=_part(block))
        return frames

    def _grow(self, block: ContentBlock, text: str) -> bytes:
        kind = f"response.{KINDS[block.kind]}.delta"
        return self._event(kind, **self._position(block), **_logprobs(block), delta=text)

    def _close(self, block: ContentBlock) -> bytes:
        position, kind = self._position(block), f"response.{KINDS[block.kind]}.done"
        if block.kind == "tool":
            assert block.call is not None
            frames = self._event(kind, **position, name=block.call.name, arguments=block.text)
        else:
            frames = self._event(kind, **position, **_logprobs(block), text=block.text)
            frames += self._event("response.content_part.done", **position, part=_part(block))
        item = self._item(block, "completed")
        self._items.append(item)
        return frames + self._event("response.output_item.done", output_index=block.number, item=item)

    def _position(self, block: ContentBlock) -> dict[str, Any]:
        """The fields of an event that say which item, and which part of it, the event belongs to."""
        position = {"item_id": self._item_id(block), "output_index": block.number}
        return position if block.kind == "tool" else {**position, "content_index": 0}

    # --- objects ------------------------------------------------------------------------------------------------------

    def _item_id(self, block: ContentBlock) -> str:
        return f"{PREFIXES[block.kind]}_{self._call.internal_id}_{block.number}"

    def _item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        parts = [_part(block)] if status == "completed" and block.kind != "tool" else []
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        if block.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": parts}
        assert block.call is not None
        function = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
        return {**item, "type": "function_call", **function}

    def _response(self, end: ResponseEnd | None) -> dict[str, Any]:
        """The response object with the items that are complete. `end` is None while the response is being generated."""
        request, params = self._request, self._prepared.params
        truncated = end is not None and end.finish_reason == "length"
        return {
            "id": request.request_id or f"resp_{self._call.internal_id}",
            "object": "response",
            "created_at": self._call.created,
            "status": "in_progress" if end is None else "incomplete" if truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "error": None,
            "model": self._model,
            "output": self._items,
            "usage": None if end is None else self._usage(),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tools": [{"strict": None, **tool} for tool in request.tools or []],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": request.text or {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "metadata": request.metadata or {},
            "user": request.user,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._call.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


# By kind of content block: the prefix of item ids, and the part of event names.
PREFIXES = {"reasoning": "rs", "text": "msg", "tool": "fc"}
KINDS = {"reasoning": "reasoning_text", "text": "output_text", "tool": "function_call_arguments"}


def _part(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _logprobs(block: ContentBlock) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}
