"""Messages between an engine and its client in another process or thread; see transport.py for their encoding.

Commands go to the engine, events come back, both in order. An event that answers a command has its `call` number or
`request_id`.
"""

from typing import Any

import msgspec

from nanovllm.engine.deltas import Delta
from nanovllm.sampling_params import SamplingParams

# --- the state of an engine -------------------------------------------------------------------------------------------


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """The present state of the engine and counts since its start. `num_running` and `num_waiting` count sequences."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # unused, and not in the prefix cache
    num_cached_blocks: int  # unused but in the prefix cache; evicted when no free block is left
    num_preemptions: int
    prefix_queries: int  # tokens looked up in the prefix cache
    prefix_hits: int
    num_prompt_tokens: int  # of all accepted requests
    num_generation_tokens: int


class RequestView(msgspec.Struct, array_like=True, gc=False):
    request_id: str
    num_prompt: int
    num_generated: int
    num_computed: int
    owner: int  # the sequence's number in `EngineView.owners`; 0 while it waits


class StepView(msgspec.Struct, array_like=True, gc=False):
    seconds: float  # from the engine's start to the step's start
    num_prefill_tokens: int
    num_decodes: int
    milliseconds: float


class EngineView(msgspec.Struct, array_like=True, gc=False):
    """A snapshot of the engine."""

    stats: EngineStats
    blocks: bytes  # one byte per block: one of the four values below
    owners: list[int]  # for each block the number of the first running sequence that uses it; 0 = none
    running: list[RequestView]
    waiting: list[RequestView]
    steps: list[StepView]  # since the last view


BLOCK_FREE, BLOCK_CACHED, BLOCK_IN_USE, BLOCK_SHARED = range(4)


# --- commands: to the engine ------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A member of a union: encoded as an array whose first element is the name of its class."""


class Start(_Message):
    """The first command: load a model."""

    model: str | None
    options: dict[str, Any]


class AddRequest(_Message):
    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None


class Abort(_Message):
    request_ids: list[str]


class GetStats(_Message):
    call: int


class ResetPrefixCache(_Message):
    call: int


class Embed(_Message):
    call: int
    token_ids: list[int]
    pooling: str


class Watch(_Message):
    """Start sending views, the first one at once; or stop."""

    on: bool


class Ping(_Message):
    pass


class Shutdown(_Message):
    pass


Command = Start | AddRequest | Abort | GetStats | ResetPrefixCache | Embed | Watch | Ping | Shutdown


# --- events: from the engine ------------------------------------------------------------------------------------------


class Ready(_Message):
    """The answer to `Start`."""

    max_model_len: int
    num_blocks: int
    block_size: int
    startup_seconds: dict[str, float]


class Failed(_Message):
    """The last event of an engine that failed."""

    kind: str  # the exception's class
    message: str
    traceback: str


class StepDone(_Message):
    """A step has ended; the deltas of all its requests."""

    deltas: list[Delta]


class Refused(_Message):
    request_id: str
    message: str


class Aborted(_Message):
    """Confirms an `Abort`: no more deltas of these requests follow."""

    request_ids: list[str]


class Answer(_Message):
    """The answer to the command of the same `call`: its result, or why it was refused."""

    call: int
    stats: EngineStats | None = None
    embedding: list[float] | None = None
    refusal: str | None = None


class View(_Message):
    view: EngineView


class Pong(_Message):
    pass


Event = Ready | Failed | StepDone | Refused | Aborted | Answer | View | Pong
