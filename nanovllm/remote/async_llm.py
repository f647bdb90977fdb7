"""The front door for asyncio: `AsyncLLM`, whose engine runs in a child process or in a thread."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self, cast
from uuid import uuid4

from nanovllm.config import Config
from nanovllm.engine.deltas import Delta, TokenScores
from nanovllm.engine.load_tokenizer import load_tokenizer
from nanovllm.engine.logprobs import by_token
from nanovllm.errors import RequestError
from nanovllm.models.registry import describe
from nanovllm.models.spec import ModelSpec
from nanovllm.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from nanovllm.remote.client import EngineClient
from nanovllm.remote.messages import AddRequest, EngineStats, EngineView, Ready
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import Message
from nanovllm.text.prompts import Prompt, read_prompt
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.default_model import DEFAULT_MODEL
from nanovllm.utils.hub import resolve_model

LONG_TEXT = 4096  # characters from which on a text is tokenized in a thread: it takes about a millisecond


class Client(Protocol):
    """Sends requests to one engine (`EngineClient`) or to several (`Fleet` in `nanovllm.remote.replicas`)."""

    @property
    def ready(self) -> Ready: ...

    @property
    def pid(self) -> int | None: ...

    def stream(self, request: AddRequest) -> AsyncGenerator[list[Delta], None]: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def check_health(self) -> None: ...

    async def stats(self) -> EngineStats: ...

    async def reset_prefix_cache(self) -> None: ...

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]: ...

    def view(self) -> AsyncGenerator[EngineView, None]: ...

    async def close(self) -> None: ...


class AsyncLLM:
    """An engine for asyncio. `start` makes one for the running event loop. Close it, or use it in `async with`.

    async with await AsyncLLM.start() as engine:
        async for output in engine.generate("The capital of France is"):
            print(output["text"])
    """

    def __init__(self, client: Client, config: Config, model_config: ModelSpec, tokenizer: Tokenizer | None) -> None:
        self._client = client
        self.config = config
        self.model_config = model_config
        self.model_name = config.model or DEFAULT_MODEL
        self.max_model_len = client.ready.max_model_len
        self.max_num_seqs = config.max_num_seqs  # sequences that run at the same time
        self.tokenizer = tokenizer

    @classmethod
    async def start(
        cls,
        model: str | Path | None = None,
        *,
        in_process: bool = False,
        stall_seconds: float = 30.0,
        **options: Any,
    ) -> "AsyncLLM":
        """Load a model in a child process or, with `in_process`, in a thread; the options are those of `LLM`.

        `check_health` calls the engine stalled if a step takes longer than `stall_seconds`.
        """
        config = Config.from_options(None if model is None else str(model), options)
        path = await asyncio.to_thread(resolve_model, config.model)
        connecting = EngineClient.start(str(path), options, in_process=in_process, stall_seconds=stall_seconds)
        return await cls._connect(connecting, config, path)

    @classmethod
    async def _connect(cls, connecting: Coroutine[Any, Any, Client], config: Config, path: Path) -> Self:
        starting = asyncio.ensure_future(connecting)
        try:  # this process reads what it needs while the engine loads
            model_config, tokenizer = await asyncio.to_thread(describe_model, path, config)
            return cls(await starting, config, model_config, tokenizer)
        except BaseException:
            await _undo(starting)
            raise

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None if it runs in a thread of this one."""
        return self._client.pid

    # --- requests -----------------------------------------------------------------------------------------------------

    async def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Add a request and yield the deltas of all its completions until each has finished.

        Raises RequestError if the request is refused, EngineClosedError if the engine ends before the request does.
        Closing the iterator, or cancelling the task that iterates, aborts the request and frees its blocks.
        """
        request = AddRequest(request_id, token_ids, params, priority, cache_salt)
        async with aclosing(self._client.stream(request)) as batches:
            async for batch in batches:
                for delta in batch:
                    yield delta

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt: outputs as they grow, each with all text so far, as `LLM.stream` gives them.

        Leaving the loop early aborts the request.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params={params!r}: must be a SamplingParams")
        text, token_ids, salt = await self._read(prompt)
        answer = GrowingOutput(request_id or uuid4().hex, text, token_ids, params)
        request = AddRequest(answer.request_id, token_ids, params, priority, salt)
        async with aclosing(self._client.stream(request)) as batches:
            async for batch in batches:
                for delta in batch:
                    answer.add(delta)
                yield answer.output()

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, written out by the model's chat template."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("skip_tokenizer_init=True: a conversation needs the tokenizer and its chat template")
        if not messages:
            raise RequestError("messages: at least one message is needed")

        def render() -> dict[str, Any]:
            text = tokenizer.render_chat(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

        prompt = await asyncio.to_thread(render)
        async with aclosing(self.generate(prompt, params, request_id, priority=priority)) as outputs:
            async for output in outputs:
                yield output

    async def _read(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return await asyncio.to_thread(read_prompt, prompt, self.tokenizer)
        return read_prompt(prompt, self.tokenizer)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their iterators see the finish reason "abort". Unknown ones are ignored."""
        self._client.abort([request_id] if isinstance(request_id, str) else request_id)

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise EngineError unless the engine is idle or has finished a step within `stall_seconds`."""
        self._client.check_health()

    async def reset_prefix_cache(self) -> None:
        await self._client.reset_prefix_cache()

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    def view(self) -> AsyncGenerator[EngineView, None]:
        """Snapshots of the engine, several per second while it works; it makes none while nobody iterates."""
        return self._client.view()

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        """The hidden state of the last token ("last") or the mean of all ("mean"), scaled to length 1."""
        return await self._client.embed(token_ids, pooling)

    async def close(self) -> None:
        """End the engine and free its memory. Iterators of running requests raise EngineClosedError."""
        await self._client.close()


class GrowingOutput:
    """Builds a request's output from its deltas."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self.request_id = request_id
        scored, self._ranked = params.logprobs is not None, not params.logprob_token_ids
        self._parts = [
            CompletionOutput(index, cumulative_logprob=0.0 if scored else None, logprobs=[] if scored else None)
            for index in range(params.n)
        ]
        self._whole = RequestOutput(
            request_id, prompt, prompt_token_ids, [], finished=False, metrics=RequestMetrics(time.monotonic())
        )

    def add(self, delta: Delta) -> None:
        part, whole = self._parts[delta.index], self._whole
        part.text += delta.text
        part.token_ids += delta.token_ids
        if part.logprobs is not None:
            scores = delta.logprobs or []
            part.logprobs += [_logprobs(entry, ranked=self._ranked) for entry in scores]
            part.cumulative_logprob = (part.cumulative_logprob or 0.0) + sum(entry.logprobs[0] for entry in scores)
        part.finish_reason = cast(FinishReason | None, delta.finish_reason)
        part.stop_reason = delta.stop_reason
        whole.num_cached_tokens = max(whole.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            whole.prompt_logprobs = [None if entry is None else _logprobs(entry) for entry in delta.prompt_logprobs]
        self._stamp(delta)

    def _stamp(self, delta: Delta) -> None:
        """Set the times of the metrics as this process sees them; the engine's own are slightly earlier."""
        metrics, now = self._whole.metrics, time.monotonic()
        if metrics.first_token_time is None and delta.token_ids:
            metrics.first_token_time = now
        self._whole.finished = all(part.finished for part in self._parts)
        if self._whole.finished:
            metrics.finished_time = now

    def output(self) -> RequestOutput:
        """The output so far; later deltas do not change it."""
        return replace(self._whole, outputs=[_copy(part) for part in self._parts])


def _copy(part: CompletionOutput) -> CompletionOutput:
    logprobs = None if part.logprobs is None else list(part.logprobs)
    return replace(part, token_ids=list(part.token_ids), logprobs=logprobs)


def describe_model(path: Path, config: Config) -> tuple[ModelSpec, Tokenizer | None]:
    """Read a model's spec, without its weights, and its tokenizer unless `skip_tokenizer_init` is set."""
    description = describe(path)
    if config.skip_tokenizer_init:
        return description.config, None
    return description.config, load_tokenizer(path, description, config.tokenizer)


async def _undo(starting: asyncio.Future[Client]) -> None:
    """Cancel the start of an engine, or close it if it has started by now."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()


def _logprobs(scores: TokenScores, *, ranked: bool = True) -> dict[int, Logprob]:
    return by_token(scores.token_ids, scores.logprobs, scores.rank, scores.tokens, ranked=ranked)
