"""A simulated replica: the engine's scheduler and prefix cache, with a computed step time instead of a device.

Every step samples the same token for all sequences; only the time of the step is computed.
"""

from typing import NamedTuple

from nanovllm.config import SchedulerConfig
from nanovllm.engine.pacer import Pacer
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_work import StepWork, WorkCounter
from nanovllm.plan import StepPlan, StepResult
from nanovllm.simulate.requests import GENERATED
from nanovllm.simulate.step_time import StepTime


class StepEnd(NamedTuple):
    """The sequences that reached a milestone in a step."""

    sampled: list[Sequence]  # whose prompt this step completed; their first token, unless they were preempted before
    ended: list[Sequence]


class Replica:
    """One engine of the fleet."""

    def __init__(self, config: SchedulerConfig, step_time: StepTime, pacer: Pacer | None = None) -> None:
        self.scheduler = Scheduler(config, pacer=pacer)
        self.busy_seconds = 0.0
        self.num_steps = 0
        self._step_time = step_time
        self.decode_gaps: list[tuple[float, int]] = []  # seconds of each step, and sequences that waited for its token
        self._counter = WorkCounter()
        self._plan: StepPlan | None = None  # of the running step, if any
        self._running: tuple[StepWork, float] = (StepWork(0, 0, 0, 0, 0), 0.0)  # its work and its time
        self._at_row: dict[int, Sequence] = {}
        self._results: dict[int, StepResult] = {}  # by number of sampled tokens

    @property
    def is_running(self) -> bool:
        return self._plan is not None

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_unfinished > 0

    def begin_step(self) -> float:
        """Schedule a step and return how many seconds it takes."""
        plan = self.scheduler.schedule()
        assert plan is not None, "with no step in flight, something can always be scheduled"
        if plan.new_rows:
            self._at_row = {seq.row: seq for seq in self.scheduler.running}
        work = self._counter.count(plan, self.scheduler)
        seconds = self._step_time.seconds(work)
        self._plan, self._running = plan, (work, seconds)
        if plan.decode_rows:
            self.decode_gaps.append((seconds, len(plan.decode_rows)))
        self.busy_seconds += seconds
        self.num_steps += 1
        return seconds

    def end_step(self) -> StepEnd:
        """Give the running step's tokens to the scheduler."""
        plan, self._plan = self._plan, None
        assert plan is not None
        if self.scheduler.pacer is not None:
            self.scheduler.pacer.learn(*self._running, self.scheduler.pacer.limit)
        sampled = [self._at_row[chunk.row] for chunk in plan.row_steps if chunk.num_sampled]
        return StepEnd(sampled, self.scheduler.update(plan, self._result(len(plan.decode_rows) + len(sampled))))

    def _result(self, num_sampled: int) -> StepResult:
        if num_sampled not in self._results:
            self._results[num_sampled] = StepResult(tokens=[[GENERATED]] * num_sampled)
        return self._results[num_sampled]
