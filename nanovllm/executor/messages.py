"""What travels between an executor and its workers: commands to every rank, in the same order; answers back.

A plan's message has no number in it: a step like the one before is the very same bytes.
"""

from dataclasses import replace

import msgspec

from nanovllm.config import Config
from nanovllm.distributed.group import Place
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sampling_params import SamplingParams


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """One member of a union; its class's name leads the array."""


# --- commands ---------------------------------------------------------------------------------------------------------


class Open(_Message):
    """To rank 0, before all else: open the place where ranks meet, at this address of its host."""

    host: str


class Start(_Message):
    """Meet the others and load the model."""

    place: Place
    num_local: int  # ranks on this host
    host: str
    port: int
    config: Config
    path: str
    max_model_len: int


class Launch(_Message):
    plan: StepPlan


class Sample(_Message):
    """What the guided rows of the plan launched last may sample."""

    masks: dict[int, bytes]


class Wait(_Message):
    """For the result of a plan. Those launched before it are waited for no more."""

    call: int
    behind: int  # how many plans were launched after it: after Ctrl-C, the two sides may have counted differently


class Embed(_Message):
    call: int
    token_ids: list[int]
    block_tables: list[list[int]]
    pooling: str


class Stop(_Message):
    """Give back all memory and end."""


Command = Open | Start | Launch | Sample | Wait | Embed | Stop


# --- answers ----------------------------------------------------------------------------------------------------------


class Opened(_Message):
    port: int


class Ready(_Message):
    num_blocks: int
    startup_seconds: dict[str, float]


class Answer(_Message):
    """To the command of the same `call`. Only one rank sends what was computed; all say what they think of it."""

    call: int
    checksum: int  # of all tokens waited for so far
    result: StepResult | None = None
    embedding: list[float] | None = None


class Failed(_Message):
    """A worker's last word."""

    kind: str  # the exception's class
    message: str
    traceback: str
    when: float  # seconds since the epoch: of several failures the first is the cause


class Lost(_Message):
    """Said for a worker that ended without a word."""

    how: str


Reply = Opened | Ready | Answer | Failed | Lost


def lean(plan: StepPlan) -> StepPlan:
    """The plan without what only the control plane reads: texts, which may be long or no valid Unicode, and a limit
    that may exceed 64 bits."""
    if all(_is_lean(row.params) for row in plan.new_rows):
        return plan
    rows = [
        replace(row, params=replace(row.params, stop=(), bad_words=(), structured_outputs=None, max_tokens=None))
        for row in plan.new_rows
    ]
    return replace(plan, new_rows=tuple(rows))


def _is_lean(params: SamplingParams) -> bool:
    texts = params.stop or params.bad_words or params.structured_outputs
    return not texts and (params.max_tokens or 0) < 2**63
