"""The state of the server between requests: is there an engine, is there room, and what did it do so far."""

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
from nanovllm.server.merge import merge
from nanovllm.server.metrics import Metrics
from nanovllm.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanovllm.engine.deltas import Delta

HEALTH_SECONDS = 5.0  # an engine that cannot say within this time that it is well, is not


class Service:
    """The engine, once it is there, and the way to it."""

    def __init__(self, engine: Engine | None, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.started = time.monotonic()
        self.created = int(time.time())
        self.draining = asyncio.Event()
        self.num_open = 0  # prompts that the engine has and that have not ended
        self._engine = engine

    # --- the engine ---------------------------------------------------------------------------------------------------

    def attach(self, engine: Engine) -> None:
        """The engine has been loaded: requests may come."""
        self._engine = engine

    def drain(self) -> None:
        """Take no more requests; those under way go on."""
        self.draining.set()

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise unavailable("the model is still being loaded", code="loading")
        return self._engine

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.settings.served_model_name or (self.engine.model_name,)

    def check_model(self, name: str | None) -> str:
        """The name that the answer bears."""
        if name is not None and name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404, f"the model {name!r} does not exist; there is {known}", param="model", code="model_not_found"
            )
        return name or self.model_names[0]

    async def check_health(self) -> None:
        """Raises unless requests are taken and the engine makes progress, or has nothing to do."""
        if self.draining.is_set():
            raise unavailable("the server is shutting down", code="draining")
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await self.engine.check_health()
        except TimeoutError:
            raise unavailable("the engine does not answer", code="stalled") from None
        except EngineError as error:
            raise unavailable(f"the engine is not well: {type(error).__name__}", code="unhealthy") from error

    # --- room ---------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self.engine.max_num_seqs + self.settings.max_queued_requests

    def check_room(self, num_prompts: int = 1) -> None:
        if self.draining.is_set():
            raise unavailable("the server is shutting down", code="draining")
        if num_prompts > self.capacity:
            raise ApiError(400, f"{num_prompts} prompts are more than the queue holds: {self.capacity}", param="prompt")
        if self.num_open + num_prompts > self.capacity:
            raise ApiError(
                429,
                f"{self.num_open} prompts are waiting or running; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    @contextmanager
    def room_for(self, num_prompts: int) -> Iterator[None]:
        self.check_room(num_prompts)
        self.num_open += num_prompts
        try:
            yield
        finally:
            self.num_open -= num_prompts

    # --- work ---------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        call: Call,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> "AsyncGenerator[tuple[int, Delta], None]":
        """(number of the prompt, delta) until every completion has ended well; anything else raises."""
        with self.room_for(len(prompts)):
            call.num_prompt_tokens += sum(map(len, prompts))
            submit = partial(self.engine.submit, params=params, priority=priority, cache_salt=cache_salt)
            streams = [
                submit(token_ids, request_id=f"{call.unique}-{number}") for number, token_ids in enumerate(prompts)
            ]
            watches = [Watch(self.metrics, call, len(token_ids)) for token_ids in prompts]
            if len(streams) == 1:  # without the work of a merge
                async with aclosing(streams[0]) as deltas:
                    async for delta in deltas:
                        watches[0].saw(delta)
                        yield 0, delta
                return
            async with aclosing(merge(streams)) as items:
                async for number, delta in items:
                    watches[number].saw(delta)
                    yield number, delta


class Watch:
    """Counts what one prompt brings."""

    def __init__(self, metrics: Metrics, call: Call, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._call = call
        self._num_prompt_tokens = num_prompt_tokens
        # by the completion's index
        self._first_at: dict[int, float] = {}
        self._last_at: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}

    def saw(self, delta: "Delta") -> None:
        """Raises if it says that the completion has failed."""
        now, index, num_new = time.monotonic(), delta.index, len(delta.token_ids)
        last_at = self._last_at.get(index)
        if last_at is None:
            self._saw_first(delta, now)
        else:
            self._metrics.inter_token_latency.observe(now - last_at)
        self._last_at[index] = now
        self._num_tokens[index] += num_new
        self._call.num_output_tokens += num_new
        if delta.finish_reason is not None:
            self._saw_last(delta.finish_reason, now, self._first_at[index], self._num_tokens[index])

    def _saw_first(self, delta: "Delta", now: float) -> None:
        call, metrics = self._call, self._metrics
        if not self._first_at:
            call.num_cached_tokens += delta.num_cached_tokens
            call.first_token_at = call.first_token_at or now
            metrics.prompt_tokens.observe(self._num_prompt_tokens)
            metrics.time_to_first_token.observe(now - call.started)
            if delta.queue_seconds is not None:
                metrics.queue_time.observe(delta.queue_seconds)
        self._first_at[delta.index], self._num_tokens[delta.index] = now, 0

    def _saw_last(self, reason: str, now: float, first_at: float, num_tokens: int) -> None:
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
