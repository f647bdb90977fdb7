"""The one loop: schedule, execute, update. Sync and overlapped differ by a queue depth of 0 or 1."""

from collections import deque

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.executor.base import Executor, StepHandle
from nanovllm.plan import StepPlan


class EngineCore:
    def __init__(self, scheduler: Scheduler, executor: Executor, *, depth: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth  # steps that may be under way while the next one is scheduled
        self.last_plan: StepPlan | None = None  # the plan whose result came last
        self._pending: deque[tuple[StepPlan, StepHandle]] = deque()

    def step(self) -> list[Sequence]:
        """Launch one step, take in the oldest; returns the sequences that ended."""
        self.last_plan = None
        plan = self.scheduler.schedule()
        if plan is not None:
            self._pending.append((plan, self.executor.launch(plan)))
            if len(self._pending) <= self.depth:
                return []
        if not self._pending:
            assert not self.scheduler.num_unfinished, "sequences wait, but none of them can ever run"
            return []
        self.last_plan, handle = self._pending.popleft()
        return self.scheduler.update(self.last_plan, handle.wait())

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.num_unfinished > 0
