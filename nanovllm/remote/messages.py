"""What travels between an engine and who uses it from another process or thread: typed, compact, one frame a message.

A frame is four bytes of length and a msgpack array. Commands go to the engine, events come back, both in order; an
event that answers a command carries its `call` number or `request_id`.
"""

from typing import Any

import msgspec

from nanovllm.engine.deltas import Delta
from nanovllm.sampling_params import SamplingParams

# --- what an engine says of itself ------------------------------------------------------------------------------------


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """Where the engine stands, and what it has done since it started. Running and waiting are counted in sequences."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # nobody uses them and nothing is known of their content
    num_cached_blocks: int  # nobody uses them, but their content is known; handed out when no free one is left
    num_preemptions: int
    prefix_queries: int  # tokens looked up in the prefix cache
    prefix_hits: int
    num_prompt_tokens: int  # of all requests taken on
    num_generation_tokens: int


class RequestView(msgspec.Struct, array_like=True, gc=False):
    request_id: str
    num_prompt: int
    num_generated: int
    num_computed: int
    owner: int  # the sequence's number in `EngineView.owners`; 0 while it waits


class StepView(msgspec.Struct, array_like=True, gc=False):
    seconds: float  # from the engine's start to the step's
    num_prefill_tokens: int
    num_decodes: int
    milliseconds: float


class EngineView(msgspec.Struct, array_like=True, gc=False):
    """The engine as a picture."""

    stats: EngineStats
    blocks: bytes  # a byte a block: one of the four below
    owners: list[int]  # for each block a small number for the (first) running sequence that uses it; 0 = none
    running: list[RequestView]
    waiting: list[RequestView]
    steps: list[StepView]  # since the last view


BLOCK_FREE, BLOCK_CACHED, BLOCK_IN_USE, BLOCK_SHARED = range(4)


# --- commands: to the engine ------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """One member of a union; its class's name leads the array."""


class Start(_Message):
    """The first command of all."""

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
    """Send views from now on, the first at once; or send none any more."""

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
    """The engine's last word."""

    kind: str  # the exception's class
    message: str
    traceback: str


class StepDone(_Message):
    """A step ended; what it brought, for all requests."""

    deltas: list[Delta]


class Refused(_Message):
    request_id: str
    message: str


class Aborted(_Message):
    """No delta of these requests comes any more."""

    request_ids: list[str]


class Answer(_Message):
    """To the command of the same `call`: what it asked for, or why not."""

    call: int
    stats: EngineStats | None = None
    embedding: list[float] | None = None
    refusal: str | None = None


class View(_Message):
    view: EngineView


class Pong(_Message):
    pass


Event = Ready | Failed | StepDone | Refused | Aborted | Answer | View | Pong
