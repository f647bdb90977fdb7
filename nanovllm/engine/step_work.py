"""The work of a step in numbers, from which its time follows; no torch."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.plan import StepPlan


class StepWork(NamedTuple):
    """The work of one step. The numbers are fractions when it is divided over several devices."""

    num_prefill: float  # prompt tokens computed
    num_decodes: float  # sequences that advance by one token
    num_sampled: float  # sampled tokens: of the decoding sequences, and of prompts that this step completes
    num_context: float  # tokens whose keys and values the decoding sequences read
    num_scores: float  # pairs of a prompt token and a token that it attends to


class WorkCounter:
    """Counts the work of a scheduler's steps, in the order in which they are scheduled."""

    def __init__(self) -> None:
        self._last_plan: StepPlan | None = None
        self._num_context = 0  # of the last plan

    def count(self, plan: "StepPlan", scheduler: "Scheduler") -> StepWork:
        """`plan` was just scheduled."""
        num_decodes = len(plan.decode_rows)
        if plan is self._last_plan:  # the same sequences, each one token longer
            self._num_context += num_decodes
            return StepWork(0, num_decodes, num_decodes, self._num_context, 0)
        self._last_plan = plan
        num_prefill = num_scores = num_completed = num_sampled = 0
        for chunk in plan.row_steps:
            num_prefill += chunk.num_new
            num_scores += chunk.num_new * chunk.start + chunk.num_new * (chunk.num_new + 1) // 2
            if chunk.num_sampled:
                num_sampled += 1
                num_completed += chunk.start + chunk.num_new
        # the scheduler already counts a prompt that this step completes among the decoding sequences
        self._num_context = sum([seq.num_computed_tokens for seq in scheduler.decoding]) - num_completed
        return StepWork(num_prefill, num_decodes, num_decodes + num_sampled, self._num_context, num_scores)
