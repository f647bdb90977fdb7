"""What the server needs of an engine: `AsyncLLM` has it, and so have `Replicas`, Ray's and the fake of the tests."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

from nanovllm.config import Config
from nanovllm.models.spec import ModelConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.deltas import Delta
    from nanovllm.remote.messages import EngineStats, EngineView


class Engine(Protocol):
    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def model_config(self) -> ModelConfig: ...

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
        """Deltas of all completions until each has finished; closing the generator aborts the request."""
        ...

    async def check_health(self) -> None: ...

    async def stats(self) -> "EngineStats": ...

    def view(self) -> "AsyncGenerator[EngineView, None]": ...

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]: ...

    async def close(self) -> None: ...
