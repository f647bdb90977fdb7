"""Messages between an executor and its workers: every rank gets the same commands in the same order, and replies.

A `Launch` has no number, so that a step with an unchanged plan is the same bytes as the one before.
"""

from dataclasses import replace

import msgspec

from nanovllm.config import Config
from nanovllm.distributed.group import Rank
from nanovllm.plan import StepPlan, StepResult
from nanovllm.sampling_params import SamplingParams


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A member of a union: encoded as an array whose first element is the name of its class."""


# --- commands ---------------------------------------------------------------------------------------------------------


class Open(_Message):
    """To rank 0, first of all: open the store where ranks find each other, at this address of its host."""

    host: str


class Start(_Message):
    """Connect to the other ranks and load the model."""

    rank: Rank
    num_local: int  # number of ranks on this host
    host: str
    port: int
    config: Config
    path: str
    max_model_len: int


class Launch(_Message):
    plan: StepPlan


class Sample(_Message):
    """Masks of the tokens that the guided rows of the last launched plan may sample."""

    masks: dict[int, list[bytes]]


class Wait(_Message):
    """Return the result of a plan. Results of plans launched before it are dropped."""

    call: int
    # Plans launched after it. A plan's own number would not do: after Ctrl-C the two sides may count differently.
    num_later: int


class Stop(_Message):
    """Free all memory and end."""


Command = Open | Start | Launch | Sample | Wait | Stop


# --- answers ----------------------------------------------------------------------------------------------------------


class Opened(_Message):
    port: int


class Ready(_Message):
    num_blocks: int
    startup_seconds: dict[str, float]


class Answer(_Message):
    """The answer to the command of the same `call`. One rank sends the result; all send a checksum of it."""

    call: int
    checksum: int  # of all tokens in results so far
    result: StepResult | None = None


class Failed(_Message):
    """The last reply of a worker that failed."""

    kind: str  # the exception's class
    message: str
    traceback: str
    when: float  # seconds since the epoch: the first of several failures is the cause


class Lost(_Message):
    """Stands in for the reply of a worker that ended without one."""

    how: str


Reply = Opened | Ready | Answer | Failed | Lost


def lean(plan: StepPlan) -> StepPlan:
    """The plan without what only the control plane reads: texts, which may be long or invalid Unicode, and the length
    limit, which may exceed 64 bits."""
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
