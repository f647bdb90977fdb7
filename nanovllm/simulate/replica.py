"""A simulated replica: the engine's scheduler and prefix cache, with a computed step time instead of a device.

Every step samples the same token for all sequences; only the time of the step is computed.
"""

from typing import NamedTuple

from nanovllm.config import SchedulerConfig
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepPlan, StepResult
from nanovllm.simulate.requests import GENERATED
from nanovllm.simulate.step_time import StepTime, StepWork


class StepEnd(NamedTuple):
    """The sequences that reached a milestone in a step."""

    sampled: list[Sequence]  # whose prompt this step completed; their first token, unless they were preempted before
    ended: list[Sequence]


class Replica:
    """One engine of the fleet."""

    def __init__(self, config: SchedulerConfig, step_time: StepTime) -> None:
        self.scheduler = Scheduler(config)
        self.busy_seconds = 0.0
        self.num_steps = 0
        self._step_time = step_time
        self._plan: StepPlan | None = None  # of the running step, if any
        self._last_plan: StepPlan | None = None
        self._num_context = 0  # tokens that the decoding sequences of the last plan read
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
        seconds = self._step_time.seconds(self._work(plan))
        self._plan = self._last_plan = plan
        self.busy_seconds += seconds
        self.num_steps += 1
        return seconds

    def end_step(self) -> StepEnd:
        """Give the running step's tokens to the scheduler."""
        plan, self._plan = self._plan, None
        assert plan is not None
        sampled = [self._at_row[chunk.row] for chunk in plan.row_steps if chunk.num_sampled]
        return StepEnd(sampled, self.scheduler.update(plan, self._result(len(plan.decode_rows) + len(sampled))))

    def _work(self, plan: StepPlan) -> StepWork:
        if plan.new_rows:
            self._at_row = {seq.row: seq for seq in self.scheduler.running}
        num_decodes = len(plan.decode_rows)
        if plan is self._last_plan:  # the same sequences, each one token longer
            self._num_context += num_decodes
            return StepWork(0, num_decodes, num_decodes, self._num_context, 0)
        num_prefill = num_scores = num_completed = num_sampled = 0
        for chunk in plan.row_steps:
            num_prefill += chunk.num_new
            num_scores += chunk.num_new * chunk.start + chunk.num_new * (chunk.num_new + 1) // 2
            if chunk.num_sampled:
                num_sampled += 1
                num_completed += chunk.start + chunk.num_new
        # the scheduler already counts a prompt that this step completes among the decoding sequences
        self._num_context = sum([seq.num_computed_tokens for seq in self.scheduler.decoding]) - num_completed
        return StepWork(num_prefill, num_decodes, num_decodes + num_sampled, self._num_context, num_scores)

    def _result(self, num_sampled: int) -> StepResult:
        if num_sampled not in self._results:
            self._results[num_sampled] = StepResult(tokens=[[GENERATED]] * num_sampled)
        return self._results[num_sampled]
