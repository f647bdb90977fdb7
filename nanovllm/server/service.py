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
    from nanovllm.engine.messages import Delta

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
        return self.engine.config.max_num_seqs + self.settings.max_queued_requests

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
                self._watch(call, number, token_ids, submit(token_ids, request_id=f"{call.unique}-{number}"))
                for number, token_ids in enumerate(prompts)
            ]
            async with aclosing(streams[0] if len(streams) == 1 else merge(streams)) as deltas:
                async for item in deltas:
                    yield item

    async def _watch(
        self, call: Call, number: int, token_ids: list[int], stream: "AsyncGenerator[Delta, None]"
    ) -> "AsyncGenerator[tuple[int, Delta], None]":
        """Pass on what one prompt brings, and count it."""
        metrics = self.metrics
        first_at: dict[int, float] = {}
        last_at: dict[int, float] = {}
        num_tokens: dict[int, int] = {}
        async with aclosing(stream):
            async for delta in stream:
                now, index = time.monotonic(), delta.index
                if not last_at:
                    call.num_cached_tokens += delta.num_cached_tokens
                    metrics.prompt_tokens.observe(len(token_ids))
                    metrics.time_to_first_token.observe(now - call.started)
                    call.first_token_at = call.first_token_at or now
                if index in last_at:
                    metrics.inter_token_latency.observe(now - last_at[index])
                else:
                    first_at[index], num_tokens[index] = now, 0
                last_at[index] = now
                num_tokens[index] += len(delta.token_ids)
                call.num_output_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._count_finished(call, delta.finish_reason, now, first_at[index], num_tokens[index])
                yield number, delta

    def _count_finished(self, call: Call, reason: str, now: float, first: float, num_tokens: int) -> None:
        call.finish_reasons.append(reason)
        if reason == "error":
            raise ApiError(500, "the engine could not finish this request", code="engine_error")
        if reason == "abort":
            raise ApiError(500, "the request was aborted", code="aborted")
        self.metrics.succeeded.add(label=reason)
        self.metrics.end_to_end.observe(now - call.started)
        self.metrics.generation_tokens.observe(num_tokens)
        if num_tokens > 1:
            self.metrics.time_per_output_token.observe((now - first) / (num_tokens - 1))
