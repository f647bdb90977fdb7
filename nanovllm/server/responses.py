"""POST /v1/responses, as far as it needs no memory: everything said so far comes with the request."""

from contextlib import aclosing
from itertools import count
from typing import Any

from nanovllm.server.blocks import Block, Closed, Ended, Grew, Opened, steps
from nanovllm.server.calls import Call
from nanovllm.server.conversation import Conversation, Prepared, prepare
from nanovllm.server.errors import refuse
from nanovllm.server.http import Frames
from nanovllm.server.protocol import REFUSED, GenerationRequest, Int, understand
from nanovllm.server.sampling import sampling_fields
from nanovllm.server.service import Service
from nanovllm.server.sse import named_event
from nanovllm.server.structured import constraint


class ResponsesRequest(GenerationRequest, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


REFUSED[ResponsesRequest] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "store": (False,),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
    "n": (1,),
    "max_tokens": (),
    "response_format": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": ([],),
}


async def create_response(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any] | Frames:
    request = understand(body, ResponsesRequest)
    model = service.check_model(request.model)
    request.stream_options = None
    ready = await prepare(service, _conversation(request, service))
    answer = ResponseAnswer(service, call, request, ready, model)
    return answer.stream() if request.stream else await answer.whole()


# --- what is asked ----------------------------------------------------------------------------------------------------


def _conversation(request: ResponsesRequest, service: Service) -> Conversation:
    sampling = sampling_fields(request, service.settings) | {"max_tokens": request.max_output_tokens}
    return Conversation(
        messages=_messages(request),
        sampling=sampling,
        tools=[_tool(tool) for tool in request.tools or []],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        constraint=constraint(_format(request.text), request.structured_outputs),
        template_kwargs=request.chat_template_kwargs or {},
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise refuse("tools", f"a tool of type {tool.get('type')!r} is not offered; only functions are")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case dict():
            raise refuse("tool_choice", "must be auto, none, required, or a function by its name")
    return choice


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in the words of `response_format`."""
    if text and text.get("verbosity") not in (None, "medium"):
        raise refuse("text", "verbosity: this server does not do that; only medium passes")
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


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    """Thinking and tool calls belong to the assistant's message that is being written."""
    match item:
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": str(id), "output": output}:
            messages.append({"role": "tool", "tool_call_id": id, "content": _text(output, place)})
        case {"type": "reasoning"}:
            thoughts = _text(item.get("content") or "", place)
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        case {"role": "assistant", "content": content}:
            before = _assistant(messages)
            before["content"] = "\n".join(filter(None, [before["content"], _text(content, place)]))
        case {"role": str(role), "content": content}:
            messages.append({"role": role, "content": _text(content, place)})
        case _:
            raise refuse("input", f"{place}: an item of type {item.get('type')!r} is not read, or lacks a field")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": "input_text" | "output_text" | "reasoning_text" | "text", "text": str(text)}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise refuse("input", f"{place}: a part of type {kind!r} is not read; this model reads text")
    return "\n".join(texts)


# --- what is answered -------------------------------------------------------------------------------------------------


class ResponseAnswer:
    def __init__(self, service: Service, call: Call, request: ResponsesRequest, ready: Prepared, model: str) -> None:
        self._call = call
        self._request = request
        self._ready = ready
        self._model = model
        self._numbers = count()
        self._items: list[dict[str, Any]] = []
        self._steps = steps(service, call, ready, priority=request.priority or 0)

    async def whole(self) -> dict[str, Any]:
        ended = Ended("stop", None)
        async with aclosing(self._steps) as taken:
            async for step in taken:
                if isinstance(step, Closed):
                    self._items.append(self._item(step.block, "completed"))
                elif isinstance(step, Ended):
                    ended = step
        return self._response(ended)

    async def stream(self) -> Frames:
        begun = False
        async with aclosing(self._steps) as taken:
            async for step in taken:
                if not begun:
                    begun = True
                    yield self._event("response.created", response=self._response(None))
                    yield self._event("response.in_progress", response=self._response(None))
                match step:
                    case Opened(block):
                        yield self._open(block)
                    case Grew(block, text):
                        yield self._grow(block, text)
                    case Closed(block):
                        yield self._close(block)
                    case Ended(reason):
                        kind = "incomplete" if reason == "length" else "completed"
                        yield self._event(f"response.{kind}", response=self._response(step))

    # --- events -------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **data: Any) -> bytes:
        return named_event(kind, {"type": kind, "sequence_number": next(self._numbers), **data})

    def _open(self, block: Block) -> bytes:
        item = self._item(block, "in_progress")
        frames = self._event("response.output_item.added", output_index=block.number, item=item)
        if block.kind != "tool":
            frames += self._event("response.content_part.added", **self._place(block), part=_part(block))
        return frames

    def _grow(self, block: Block, text: str) -> bytes:
        return self._event(f"response.{KINDS[block.kind]}.delta", **self._place(block), **_logprobs(block), delta=text)

    def _close(self, block: Block) -> bytes:
        place, name = self._place(block), f"response.{KINDS[block.kind]}.done"
        if block.kind == "tool":
            assert block.call is not None
            frames = self._event(name, **place, name=block.call.name, arguments=block.text)
        else:
            frames = self._event(name, **place, **_logprobs(block), text=block.text)
            frames += self._event("response.content_part.done", **place, part=_part(block))
        item = self._item(block, "completed")
        self._items.append(item)
        return frames + self._event("response.output_item.done", output_index=block.number, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.number}
        return place if block.kind == "tool" else {**place, "content_index": 0}

    # --- objects ------------------------------------------------------------------------------------------------------

    def _item_id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._call.unique}_{block.number}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        parts = [_part(block)] if status == "completed" and block.kind != "tool" else []
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "thinking":
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        if block.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": parts}
        assert block.call is not None
        called = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
        return {**item, "type": "function_call", **called}

    def _response(self, ended: Ended | None) -> dict[str, Any]:
        """The response as far as it has come; None means that it goes on."""
        request, params = self._request, self._ready.params
        cut = ended is not None and ended.finish_reason == "length"
        return {
            "id": f"resp_{self._call.unique}",
            "object": "response",
            "created_at": self._call.created,
            "status": "in_progress" if ended is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": self._model,
            "output": self._items,
            "usage": None if ended is None else self._usage(),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tools": [{"strict": None, **tool} for tool in request.tools or []],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": request.text or {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
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


PREFIXES = {"thinking": "rs", "text": "msg", "tool": "fc"}
KINDS = {"thinking": "reasoning_text", "text": "output_text", "tool": "function_call_arguments"}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}
