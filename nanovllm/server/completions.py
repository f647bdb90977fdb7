"""POST /v1/completions of the OpenAI API."""

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from nanovllm.sampling_params import SamplingParams
from nanovllm.server.calls import Call
from nanovllm.server.errors import refuse
from nanovllm.server.http import EventStream
from nanovllm.server.intervals import in_intervals
from nanovllm.server.prompts import as_list, read_prompts
from nanovllm.server.protocol import CompletionRequest, parse_request
from nanovllm.server.sampling import make_params, prompt_truncation, sampling_fields
from nanovllm.server.scores import CompletionLogprobs, TokenFormatter, concatenated, prompt_logprobs
from nanovllm.server.service import Service
from nanovllm.server.sse import DONE, ChunkWriter
from nanovllm.server.structured import constraint, structured_outputs

if TYPE_CHECKING:
    from nanovllm.engine.deltas import Delta, TokenScores

DEFAULT_MAX_TOKENS = 16  # as in the OpenAI API


async def complete(service: Service, call: Call, body: dict[str, Any]) -> dict[str, Any] | EventStream:
    """Handle a request: the response body, or the stream of chunks if `stream` is set."""
    request = parse_request(body, CompletionRequest)
    model = service.check_model(request.model)
    params = _params(request, service)
    prompts = await read_prompts(
        service.engine,
        request.prompt,
        field="prompt",
        add_special_tokens=request.add_special_tokens is not False,
        max_prompts=service.settings.max_prompts_per_request,
        truncation=prompt_truncation(request, service.engine.max_model_len, params.max_tokens),
    )
    if params.n * len(prompts) > service.settings.max_prompts_per_request:
        limit = service.settings.max_prompts_per_request
        raise refuse(
            "n", f"{params.n} for each of {len(prompts)} prompts; a request may have at most {limit} completions"
        )
    responder = CompletionResponder(service, call, request, prompts, params, model)
    return responder.stream() if request.stream else await responder.full()


def _params(request: CompletionRequest, service: Service) -> SamplingParams:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise refuse("best_of", "is not supported: all n completions are returned; leave it out")
    if _echoes_only(request) and request.logprob_token_ids:
        raise refuse("logprob_token_ids", "are those of generated tokens, and max_tokens is 0; leave it out")
    fields = sampling_fields(request, service.settings)
    # echo with max_tokens=0 returns the prompt and its logprobs only. The engine must generate at least one token.
    fields["max_tokens"] = 1 if _echoes_only(request) else DEFAULT_MAX_TOKENS
    if request.max_tokens is not None and not _echoes_only(request):
        fields["max_tokens"] = request.max_tokens
    fields["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    structured = structured_outputs(
        constraint(
            request.response_format,
            request.structured_outputs,
            grammar=request.grammar,
            json_schema=request.json_schema,
        )
    )
    return make_params(**fields, **({"structured_outputs": structured} if structured is not None else {}))


def _echoes_only(request: CompletionRequest) -> bool:
    return bool(request.echo) and request.max_tokens == 0


@dataclass
class _Choice:
    """What has been generated of one completion, after its prompt if the prompt is echoed."""

    logprobs: CompletionLogprobs
    text: list[str] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class _Update:
    """An addition to a choice."""

    text: str
    token_ids: list[int]
    logprobs: dict[str, Any] | None


class CompletionResponder:
    """Writes the response to one request, as one JSON object or as a stream of chunks.

    There are n choices per prompt; choice i belongs to prompt i // n.
    """

    def __init__(
        self,
        service: Service,
        call: Call,
        request: CompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        model: str,
    ) -> None:
        self._call = call
        self._request = request
        self._prompts = prompts
        self._n = params.n
        self._tokenizer = service.engine.tokenizer
        self._formatter = TokenFormatter(self._tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._head = {
            "id": f"cmpl-{request.request_id or call.internal_id}",
            "object": "text_completion",
            "created": call.created,
            "model": model,
        }
        self._fingerprint = service.fingerprint
        self._choices = [_Choice(self._logprobs(token_ids, params)) for token_ids in prompts for _ in range(params.n)]
        self._prompt_scores: dict[int, list[TokenScores | None]] = {}  # by the prompt's number
        self._started: set[int] = set()  # choices that have begun
        self._deltas = service.generate(
            call, prompts, params, priority=request.priority or 0, cache_salt=request.cache_salt
        )
        if request.stream and request.stream_interval is not None:
            self._deltas = in_intervals(self._deltas, request.stream_interval)

    def _logprobs(self, prompt_token_ids: list[int], params: SamplingParams) -> CompletionLogprobs:
        return CompletionLogprobs(
            self._formatter,
            self._tokenizer,
            prompt_token_ids=prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )

    # --- as one object ------------------------------------------------------------------------------------------------

    async def full(self) -> dict[str, Any]:
        """Wait for all completions and return the response body."""
        async with aclosing(self._deltas) as deltas:
            async for number, delta in deltas:
                index = number * self._n + delta.index
                choice = self._choices[index]
                for update in self._updates(number, index, delta):
                    choice.text.append(update.text)
                    choice.token_ids += update.token_ids
                    choice.scores += [update.logprobs] if update.logprobs is not None else []
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return {
            **self._head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._usage(),
            "kv_transfer_params": None,
        }

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        number, wants_ids = index // self._n, self._request.return_token_ids
        wants_scores = self._request.prompt_logprobs is not None
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": concatenated(choice.scores) if choice.scores else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": prompt_logprobs(self._prompt_scores.get(number)) if wants_scores else None,
            "prompt_token_ids": self._prompts[number] if wants_ids else None,
            "token_ids": choice.token_ids if wants_ids else None,
        }

    # --- as a stream --------------------------------------------------------------------------------------------------

    async def stream(self) -> EventStream:
        """Yield the response's chunks. The last chunk of each choice has the finish reason."""
        request = self._request
        writer = ChunkWriter(
            self._head,
            include_usage=request.include_usage,
            running_usage=self._usage if request.continuous_usage else None,
            fingerprint=self._fingerprint,
        )
        async with aclosing(self._deltas) as deltas:
            async for number, delta in deltas:
                frames = b"".join(self._frames(writer, number, delta))
                if frames:
                    yield frames
        if request.include_usage:
            yield writer.usage(self._usage())
        yield DONE

    def _frames(self, writer: ChunkWriter, number: int, delta: "Delta") -> Iterator[bytes]:
        """The chunks of a delta. Tokens without text yet, such as half a character, have a chunk with empty text."""
        index = number * self._n + delta.index
        first = index not in self._started
        updates = list(self._updates(number, index, delta)) or [_Update("", [], None)]
        for update in updates:
            ids = b""
            if self._request.return_token_ids:
                ids = b',"token_ids":' + orjson.dumps(update.token_ids)
                ids += b',"prompt_token_ids":' + orjson.dumps(self._prompts[number]) if first else b""
                first = False
            parts = (index, orjson.dumps(update.text), orjson.dumps(update.logprobs))
            if delta.finish_reason is not None and update is updates[-1]:
                choice = self._choices[index]
                reasons = (orjson.dumps(choice.finish_reason), orjson.dumps(choice.stop_reason), ids)
                choice_format = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}'
                yield writer.last_chunk(choice_format % (*parts, *reasons))
            elif update.text or update.token_ids or update.logprobs or ids:
                yield writer.chunk(b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}' % (*parts, ids))

    # --- both ---------------------------------------------------------------------------------------------------------

    def _updates(self, number: int, index: int, delta: "Delta") -> Iterator[_Update]:
        """What a delta adds to a choice: the echoed prompt, if this is the first delta, then the generated tokens."""
        choice = self._choices[index]
        if delta.prompt_logprobs is not None:
            self._prompt_scores[number] = delta.prompt_logprobs
        if index not in self._started:
            self._started.add(index)
            if self._request.echo:
                yield self._echo(number, choice)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if not _echoes_only(self._request):
            logprobs = None
            if self._request.logprobs is not None:
                finished = delta.finish_reason is not None
                logprobs = choice.logprobs.format(delta.text, delta.logprobs or [], finished=finished)
            yield _Update(delta.text, delta.token_ids, logprobs)

    def _echo(self, number: int, choice: _Choice) -> _Update:
        """The prompt as the beginning of a choice. Token ids that were sent, or left by truncation, are decoded."""
        token_ids, text = self._prompts[number], as_list(self._request.prompt, "prompt")[number]
        if not isinstance(text, str) or self._request.truncate_prompt_tokens is not None:
            text = "" if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special_tokens=False)
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = choice.logprobs.echo(text, self._prompt_scores[number])
        return _Update(text, [], logprobs)

    def _usage(self) -> dict[str, Any]:
        """The token counts; the token generated only to echo the prompt is not counted."""
        usage = self._call.usage()
        if _echoes_only(self._request):
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage
