"""The engine loop: schedule, execute, update. Depth 0 waits for each step; depth 1 launches the next one first."""

from collections import deque
from typing import TYPE_CHECKING

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepPlan

if TYPE_CHECKING:
    from nanovllm.executor.base import Executor, StepHandle


class EngineCore:
    def __init__(self, scheduler: Scheduler, executor: "Executor", *, depth: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth  # launched steps whose results need not be known when the next one is scheduled
        self.last_plan: StepPlan | None = None  # the plan whose result was read in the last step()
        self._pending: deque[tuple[StepPlan, StepHandle]] = deque()
        self._clock = None
        if scheduler.pacer is not None:
            self._clock = scheduler.pacer.clock(scheduler, beside_host=executor.runs_beside_host)

    def step(self) -> list[Sequence]:
        """Launch one step and read the result of the oldest; returns the sequences that ended."""
        self.last_plan = None
        plan = self.scheduler.schedule()
        if plan is not None:
            if self._clock is not None:
                self._clock.begins(plan)
            handle = self.executor.launch(plan)
            self._pending.append((plan, handle))
            if plan.guided_rows:
                return self._sample_guided(handle)
            if len(self._pending) <= self.depth:
                return []
        if not self._pending:
            assert not self.scheduler.num_unfinished, "sequences wait, but none of them can ever run"
            return []
        return self._take_in()

    def _sample_guided(self, handle: "StepHandle") -> list[Sequence]:
        """Send the masks of the step just launched. They depend on the tokens before it; it runs meanwhile."""
        from nanovllm.engine.guide import step_masks

        ended: list[Sequence] = []
        while len(self._pending) > 1:
            ended += self._take_in()
        masks, given_up = step_masks(self.scheduler)
        handle.sample(masks)
        ended += given_up
        return ended if self.depth else ended + self._take_in()

    def _take_in(self) -> list[Sequence]:
        self.last_plan, handle = self._pending.popleft()
        result = handle.wait() if self._clock is None else self._clock.result_of(handle.wait)
        return self.scheduler.update(self.last_plan, result)

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.num_unfinished > 0
