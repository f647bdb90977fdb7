"""The state that all requests share: the engine, the number of open prompts, and metrics."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.calls import Call
from nanovllm.server.engine import Engine
from nanovllm.server.errors import ApiError, unavailable
from nanovllm.server.fingerprint import system_fingerprint
from nanovllm.server.merge import merge
from nanovllm.server.metrics import Metrics
from nanovllm.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanovllm.engine.deltas import Delta

HEALTH_SECONDS = 5.0  # the engine must reply to a health check within this time


class Service:
    """The engine, once it is loaded, with admission control and metrics."""

    def __init__(self, engine: Engine | None, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.started = time.monotonic()
        self.created = int(time.time())
        self.draining = asyncio.Event()
        self.num_open_prompts = 0  # prompts that the engine has and has not finished
        self._engine = engine
        self._fingerprint: str | None = None  # made for the first request

    # --- the engine ---------------------------------------------------------------------------------------------------

    def attach(self, engine: Engine) -> None:
        """Set the engine after it was loaded. From now on requests are accepted."""
        self._engine = engine

    def drain(self) -> None:
        """Accept no more requests; open ones continue."""
        self.draining.set()

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine, or an error for the client while the model is loading."""
        if self._engine is None:
            raise unavailable("the model is still loading", code="loading")
        return self._engine

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.settings.served_model_name or (self.engine.model_name,)

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of responses: it changes with the version, the model and the engine's options."""
        if self._fingerprint is None:
            self._fingerprint = system_fingerprint(self.engine)
        return self._fingerprint

    def check_model(self, name: str | None) -> str:
        """Check the model that a request names, and return the name for the response."""
        if name is not None and name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404, f"the model {name!r} does not exist; available: {known}", param="model", code="model_not_found"
            )
        return name or self.model_names[0]

    async def check_health(self) -> None:
        """Raise an ApiError unless requests are accepted and the engine is idle or makes progress."""
        if self.draining.is_set():
            raise unavailable("the server is shutting down", code="draining")
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await self.engine.check_health()
        except TimeoutError:
            raise unavailable("the engine does not respond", code="stalled") from None
        except EngineError as error:
            raise unavailable(f"the engine is unhealthy: {type(error).__name__}", code="unhealthy") from error

    # --- admission ----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """How many prompts may be running and waiting together."""
        return self.engine.max_num_seqs + self.settings.max_queued_requests

    def check_capacity(self, num_prompts: int = 1) -> None:
        """Raise an ApiError unless this many more prompts would be accepted."""
        if self.draining.is_set():
            raise unavailable("the server is shutting down", code="draining")
        if num_prompts > self.capacity:
            raise ApiError(400, f"{num_prompts} prompts exceed the queue's capacity of {self.capacity}", param="prompt")
        if self.num_open_prompts + num_prompts > self.capacity:
            raise ApiError(
                429,
                f"{self.num_open_prompts} prompts are waiting or running; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    @contextmanager
    def admit(self, num_prompts: int) -> Iterator[None]:
        """Count prompts as open while the body runs; raise an ApiError if there is no capacity for them."""
        self.check_capacity(num_prompts)
        self.num_open_prompts += num_prompts
        try:
            yield
        finally:
            self.num_open_prompts -= num_prompts

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        call: Call,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> "AsyncGenerator[tuple[int, Delta], None]":
        """Yield (number of the prompt, delta) until all completions have finished. A failed completion raises."""
        with self.admit(len(prompts)):
            call.num_prompt_tokens += sum(map(len, prompts))
            submit = partial(self.engine.submit, params=params, priority=priority, cache_salt=cache_salt)
            streams = [
                submit(token_ids, request_id=f"{call.internal_id}-{number}") for number, token_ids in enumerate(prompts)
            ]
            recorders = [PromptMetrics(self.metrics, call, len(token_ids)) for token_ids in prompts]
            if len(streams) == 1:  # no merging needed
                async with aclosing(streams[0]) as deltas:
                    async for delta in deltas:
                        recorders[0].record(delta)
                        yield 0, delta
                return
            async with aclosing(merge(streams)) as items:
                async for number, delta in items:
                    recorders[number].record(delta)
                    yield number, delta


class PromptMetrics:
    """Records the deltas of one prompt's completions in the server's metrics and in the call's token counts."""

    def __init__(self, metrics: Metrics, call: Call, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._call = call
        self._num_prompt_tokens = num_prompt_tokens
        # All by the completion's index.
        self._first_at: dict[int, float] = {}
        self._last_at: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}

    def record(self, delta: "Delta") -> None:
        """Record a delta. Raises an ApiError if its completion failed."""
        now, index, num_new = time.monotonic(), delta.index, len(delta.token_ids)
        last_at = self._last_at.get(index)
        if last_at is None:
            self._record_first(delta, now)
        else:
            self._metrics.inter_token_latency.observe(now - last_at)
        self._last_at[index] = now
        self._num_tokens[index] += num_new
        self._call.num_output_tokens += num_new
        if delta.finish_reason is not None:
            self._record_finish(delta.finish_reason, now, self._first_at[index], self._num_tokens[index])

    def _record_first(self, delta: "Delta", now: float) -> None:
        call, metrics = self._call, self._metrics
        if not self._first_at:
            call.num_cached_tokens += delta.num_cached_tokens
            call.first_token_at = call.first_token_at or now
            metrics.prompt_tokens.observe(self._num_prompt_tokens)
            metrics.time_to_first_token.observe(now - call.started)
            if delta.queue_seconds is not None:
                metrics.queue_time.observe(delta.queue_seconds)
        self._first_at[delta.index], self._num_tokens[delta.index] = now, 0

    def _record_finish(self, reason: str, now: float, first_at: float, num_tokens: int) -> None:
        call, metrics = self._call, self._metrics
        call.finish_reasons.append(reason)
        if reason == "error":
            raise ApiError(500, "the engine could not finish this request", code="engine_error")
        if reason == "abort":
            raise ApiError(500, "the request was aborted", code="aborted")
        metrics.succeeded.add(label=reason)
        metrics.end_to_end.observe(now - call.started)
        metrics.generation_tokens.observe(num_tokens)
        if num_tokens > 1:
            metrics.time_per_output_token.observe((now - first_at) / (num_tokens - 1))
