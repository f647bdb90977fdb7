"""The engine interface that the server uses. `AsyncLLM`, `Replicas`, ray_app's engine and the tests' fake have it."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

from nanovllm.config import Config
from nanovllm.models.spec import ModelSpec
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.deltas import Delta
    from nanovllm.remote.messages import EngineStats, EngineView


class Engine(Protocol):
    """An engine, or several behind one interface."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def model_config(self) -> ModelSpec: ...

    @property
    def config(self) -> Config: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def model_name(self) -> str: ...

    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> "AsyncGenerator[Delta, None]":
        """Yield the deltas of all completions until each has finished. Closing the generator aborts the request."""
        ...

    async def check_health(self) -> None:
        """Raise an EngineError unless the engine is healthy."""
        ...

    async def stats(self) -> "EngineStats": ...

    def view(self) -> "AsyncGenerator[EngineView, None]":
        """Yield snapshots of the engine's state until closed."""
        ...

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        """The embedding of a prompt; `pooling` is "mean" or "last"."""
        ...

    async def close(self) -> None: ...
