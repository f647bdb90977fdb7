"""POST /v1/chat/completions of the OpenAI API."""

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from nanovllm.server.calls import Call
from nanovllm.server.conversation import Conversation, OutputParser, PreparedChat, prepare
from nanovllm.server.errors import refuse
from nanovllm.server.http import EventStream
from nanovllm.server.intervals import in_intervals
from nanovllm.server.parsers import forces_call
from nanovllm.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    collect,
    final_finish_reason,
)
from nanovllm.server.prompts import normalize_messages
from nanovllm.server.protocol import ChatRequest, parse_request
from nanovllm.server.sampling import prompt_truncation, sampling_fields
from nanovllm.server.scores import TokenFormatter, chat_logprobs, prompt_logprobs
from nanovllm.server.service import Service
from nanovllm.server.sse import DONE, ChunkWriter
from nanovllm.server.structured import constraint
from nanovllm.server.thinking import effort_variables

if TYPE_CHECKING:
    from nanovllm.engine.deltas import Delta

# As in vLLM, a message has every field of the API. Those that are not used are null.
UNUSED_MESSAGE_FIELDS = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
MARK = b"\0"  # placeholder for the text in a chunk template; JSON cannot contain it


async def chat(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any] | EventStream:
    """Handle a request: the response body, or the stream of chunks if `stream` is set."""
    request = parse_request(body, ChatRequest)
    model = service.check_model(request.model)
    prepared = await prepare(service, _conversation(request, service))
    formatter = TokenFormatter(service.engine.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
    responder = ChatResponder(service, call, request, prepared, model, formatter)
    return responder.stream() if request.stream else await responder.full()


def _conversation(request: ChatRequest, service: Service) -> Conversation:
    if request.top_logprobs is not None and not request.logprobs:
        raise refuse("top_logprobs", "needs logprobs: true; set it, or leave top_logprobs out")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise refuse("max_tokens", "differs from max_completion_tokens; set only one of them")
    sampling = sampling_fields(request, service.settings)
    sampling["max_tokens"] = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    sampling["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    continued = bool(request.continue_final_message)
    return Conversation(
        messages=request.messages,
        sampling=sampling,
        tools=request.tools or [],
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        include_reasoning=request.include_reasoning is not False,
        constraint=constraint(
            request.response_format,
            request.structured_outputs,
            grammar=request.grammar,
            json_schema=request.json_schema,
            forced_call=forces_call(request.tool_choice),
        ),
        add_generation_prompt=not continued if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continued,
        add_special_tokens=bool(request.add_special_tokens),
        template_kwargs=effort_variables(request.reasoning_effort) | (request.chat_template_kwargs or {}),
        truncation=prompt_truncation(request, service.engine.max_model_len, sampling["max_tokens"]),
    )


@dataclass
class _Choice:
    """What has been generated of one completion."""

    parser: OutputParser
    text: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    has_calls: bool = False

    def read(self, delta: "Delta") -> list[Event]:
        """Parse the delta's text into events. Empty if the parser says that all text is content."""
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.parser.is_content_only:
            return []
        events = self.parser.feed(delta.text, finished=delta.finish_reason is not None)
        self.has_calls = self.has_calls or any(isinstance(event, ToolCallStart) for event in events)
        return events

    @property
    def reported_finish_reason(self) -> str | None:
        """The finish reason as the API reports it: "tool_calls" instead of "stop" after tool calls."""
        return final_finish_reason(self.finish_reason, has_tool_calls=self.has_calls)


class ChatResponder:
    """Writes the response to one request, as one JSON object or as a stream of chunks."""

    def __init__(
        self,
        service: Service,
        call: Call,
        request: ChatRequest,
        prepared: PreparedChat,
        model: str,
        formatter: TokenFormatter,
    ) -> None:
        self._call = call
        self._request = request
        self._prepared = prepared
        self._formatter = formatter
        self._head = {
            "id": f"chatcmpl-{request.request_id or call.internal_id}",
            "created": call.created,
            "model": model,
        }
        self._echoed = _echoed(request)
        self._fingerprint = service.fingerprint
        self._choices = [_Choice(prepared.parser.new_copy()) for _ in range(prepared.params.n)]
        self._deltas = service.generate(
            call, [prepared.token_ids], prepared.params, priority=request.priority or 0, cache_salt=request.cache_salt
        )
        if request.stream and request.stream_interval is not None:
            self._deltas = in_intervals(self._deltas, request.stream_interval)

    # --- as one object ------------------------------------------------------------------------------------------------

    async def full(self) -> dict[str, Any]:
        """Wait for all completions and return the response body."""
        prompt_scores = None
        async with aclosing(self._deltas) as deltas:
            async for _, delta in deltas:
                choice = self._choices[delta.index]
                choice.text.append(delta.text)
                choice.events += self._read(delta)
                choice.token_ids += delta.token_ids
                choice.logprobs += self._logprobs(delta) or []
                prompt_scores = delta.prompt_logprobs or prompt_scores
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(number, choice) for number, choice in enumerate(self._choices)],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._call.usage(),
            "prompt_logprobs": None if prompt_scores is None else prompt_logprobs(prompt_scores),
            "prompt_token_ids": self._prepared.token_ids if self._request.return_token_ids else None,
            "prompt_text": self._prepared.text if self._request.return_prompt_text else None,
            "kv_transfer_params": None,
        }

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._echo(_message(choice)),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._request.logprobs else None,
            "finish_reason": choice.reported_finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._request.return_token_ids else None,
        }

    def _echo(self, message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": self._echoed + (message["content"] or "")} if self._echoed else message

    def _read(self, delta: "Delta") -> list[Event]:
        choice = self._choices[delta.index]
        self._call.num_reasoning_tokens += choice.parser.count_reasoning_tokens(delta.token_ids)
        return choice.read(delta)

    def _logprobs(self, delta: "Delta") -> list[dict[str, Any]] | None:
        if not self._request.logprobs:
            return None
        num_top = None if self._request.logprob_token_ids else self._request.top_logprobs or 0
        return chat_logprobs(delta.logprobs or [], self._formatter, num_top)

    # --- as a stream --------------------------------------------------------------------------------------------------

    async def stream(self) -> EventStream:
        """Yield the response's chunks. The first chunk of each choice has the role, the last one the finish reason.

        The roles of all choices are sent before the first token.
        """
        request = self._request
        writer = ChunkWriter(
            {**self._head, "object": "chat.completion.chunk"},
            include_usage=request.include_usage,
            running_usage=self._call.usage if request.continuous_usage else None,
            fingerprint=self._fingerprint,
        )
        templates = [self._template(writer, index) for index in range(len(self._choices))]
        started = False
        async with aclosing(self._deltas) as deltas:
            async for _, delta in deltas:
                index = delta.index
                frames = b"" if started else self._role_frames(writer)
                started = True
                template = templates[index]
                only_text = delta.finish_reason is None and self._choices[index].parser.rest_is_content
                if template is not None and only_text:
                    frames += template[0] + orjson.dumps(delta.text) + template[1]
                else:
                    frames += b"".join(self._frames(writer, delta))
                if frames:
                    yield frames
        if request.include_usage:
            yield writer.usage(self._call.usage())
        yield DONE

    def _role_frames(self, writer: ChunkWriter) -> bytes:
        """The first chunk of each choice. The first of all has what the request wants to know about the prompt."""
        extra = b""
        if self._request.return_token_ids:
            extra = b',"prompt_token_ids":' + orjson.dumps(self._prepared.token_ids)
        if self._request.return_prompt_text:
            extra += b',"prompt_text":' + orjson.dumps(self._prepared.text)
        usage, frames = self._call.usage_of_prompt(), b""
        for index in range(len(self._choices)):
            choice = _chunk_choice(index, b'{"role":"assistant","content":""}')
            frames += writer.chunk(choice, extra, usage=usage)
            extra = b""
        for index in range(len(self._choices) if self._echoed else 0):
            echo = b'{"content":%b}' % orjson.dumps(self._echoed)
            frames += writer.chunk(_chunk_choice(index, echo), usage=usage)
        return frames

    def _template(self, writer: ChunkWriter, index: int) -> tuple[bytes, bytes] | None:
        """The bytes of a chunk before and after its text, for chunks that have only text. This is the fast path.

        None if every chunk of this request has more than text.
        """
        if self._request.logprobs or self._request.return_token_ids:
            return None
        before, after = _chunk_choice(index, b'{"content":%b}' % MARK).split(MARK)
        return writer.template(before, after)

    def _frames(self, writer: ChunkWriter, delta: "Delta") -> Iterator[bytes]:
        choice = self._choices[delta.index]
        events = self._read(delta)
        if choice.parser.is_content_only:  # tokens without text yet, such as half a character, have a chunk, too
            chunk_deltas = [b'{"content":%b}' % orjson.dumps(delta.text)] if delta.text or delta.token_ids else []
        else:
            chunk_deltas = [_event_delta(event) for event in events]
        logprobs, token_ids = self._logprobs(delta), delta.token_ids if self._request.return_token_ids else None
        if not chunk_deltas and (logprobs or token_ids or delta.finish_reason is not None):
            chunk_deltas = [b'{"content":""}' if logprobs or token_ids else b"{}"]
        for number, chunk_delta in enumerate(chunk_deltas):
            if number:  # logprobs and token ids belong to the first chunk only
                logprobs = token_ids = None
            if delta.finish_reason is not None and number == len(chunk_deltas) - 1:
                yield writer.last_chunk(_chunk_choice(delta.index, chunk_delta, logprobs, token_ids, choice))
            else:
                yield writer.chunk(_chunk_choice(delta.index, chunk_delta, logprobs, token_ids))


def _echoed(request: ChatRequest) -> str:
    """With `echo`, the text of the last message if it is the assistant's, which begins the response."""
    last = normalize_messages(request.messages)[-1] if request.echo else {}
    return last["content"] if last.get("role") == "assistant" else ""


def _message(choice: _Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.text), **UNUSED_MESSAGE_FIELDS}
    if choice.parser.is_content_only:
        return message
    parsed = collect(choice.events)
    message["content"] = parsed.content
    if parsed.reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": tool.id, "type": "function", "function": {"name": tool.name, "arguments": tool.arguments}}
            for tool in parsed.tool_calls
        ]
    return message


def _event_delta(event: Event) -> bytes:
    if isinstance(event, ContentDelta):
        return b'{"content":%b}' % orjson.dumps(event.text)
    if isinstance(event, ReasoningDelta):
        text = orjson.dumps(event.text)
        return b'{"reasoning":%b,"reasoning_content":%b}' % (text, text)
    return orjson.dumps({"tool_calls": [_call_delta(event)]})


def _call_delta(event: ToolCallStart | ToolCallArguments) -> dict[str, Any]:
    if isinstance(event, ToolCallArguments):
        return {"index": event.index, "function": {"arguments": event.text}}
    function = {"name": event.name, "arguments": ""}
    return {"index": event.index, "id": event.id, "type": "function", "function": function}


def _chunk_choice(
    index: int,
    delta: bytes,
    logprobs: list[dict[str, Any]] | None = None,
    token_ids: list[int] | None = None,
    finished: _Choice | None = None,  # the choice, if this is its last chunk, which has the finish reason
) -> bytes:
    if logprobs is None and token_ids is None and finished is None:
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta)
    scores = b"null" if logprobs is None else orjson.dumps({"content": logprobs, "refusal": None})
    ids = b"" if token_ids is None else b',"token_ids":' + orjson.dumps(token_ids)
    reason = b"null"
    if finished is not None:
        reason = b'%b,"stop_reason":%b' % (
            orjson.dumps(finished.reported_finish_reason),
            orjson.dumps(finished.stop_reason),
        )
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, delta, scores, reason, ids)
