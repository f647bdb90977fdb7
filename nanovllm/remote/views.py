"""Snapshots of the engine for those who watch it: blocks, requests, and the steps since the last snapshot."""

import time
from collections import deque

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepPlan
from nanovllm.remote.messages import (
    BLOCK_CACHED,
    BLOCK_IN_USE,
    BLOCK_SHARED,
    EngineStats,
    EngineView,
    RequestView,
    StepView,
)

SECONDS_BETWEEN_VIEWS = 0.1
MAX_STEPS_KEPT = 1000  # for the next view


class ViewRecorder:
    """Collects what goes into the next view, and says when it is due."""

    def __init__(self) -> None:
        self.changed = True
        self._steps: deque[StepView] = deque(maxlen=MAX_STEPS_KEPT)
        self._next = 0.0

    def record_step(self, plan: StepPlan, *, seconds: float, duration: float) -> None:
        """Add a step that began `seconds` after the engine's start and took `duration` seconds."""
        num_prefill_tokens = plan.num_prompt_tokens
        self._steps.append(StepView(seconds, num_prefill_tokens, len(plan.decode_rows), 1000 * duration))
        self.changed = True

    def seconds_to_next(self) -> float | None:
        """Seconds until the next view is due; None while there is nothing new to show."""
        return max(0.0, self._next - time.monotonic()) if self.changed else None

    def take(self, scheduler: Scheduler, stats: EngineStats) -> EngineView:
        """The view of this moment; its steps will not be in the next one."""
        self.changed = False
        self._next = time.monotonic() + SECONDS_BETWEEN_VIEWS
        steps = list(self._steps)
        self._steps.clear()
        states, owners = block_states(scheduler)
        return EngineView(
            stats=stats,
            blocks=states,
            owners=owners,
            running=[_request_view(seq) for seq in scheduler.running],
            waiting=[_request_view(seq) for seq in scheduler.waiting],
            steps=steps,
        )


def block_states(scheduler: Scheduler) -> tuple[bytes, list[int]]:
    """The state of each block, and the row of the first sequence that uses it (0 if none does); group after group."""
    manager = scheduler.block_manager
    states = bytearray(manager.num_blocks)
    owners = [0] * manager.num_blocks
    begin = 0  # of the group's blocks
    for index, pool in enumerate(manager.pools):
        for block in pool.cached:
            states[begin + block] = BLOCK_CACHED
        for seq in scheduler.running:
            for block in seq.block_tables[index].held:
                states[begin + block] = BLOCK_SHARED if owners[begin + block] else BLOCK_IN_USE
                owners[begin + block] = owners[begin + block] or seq.row
        begin += pool.group.num_blocks
    return bytes(states), owners


def _request_view(seq: Sequence) -> RequestView:
    return RequestView(
        request_id=seq.request_id,
        num_prompt=seq.num_prompt_tokens,
        num_generated=seq.num_completion_tokens,
        num_computed=seq.num_computed_tokens,
        owner=seq.row,
    )
