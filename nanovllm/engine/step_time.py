"""How long a step takes, learned from measured steps; no torch.

A step of decodes takes a + b * sequences + c * tokens of their contexts, and prompt chunks add d * tokens + e * pairs
of a token and a token that it attends to. The coefficients follow each measured step (normalized least mean squares),
so that they fit the device, the model and the sizes of steps that occur now.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.plan import StepPlan

# usual amounts, which make the coefficients comparable: 1, sequences, tokens of contexts, prompt tokens, pairs
UNITS = (1.0, 256.0, 256.0 * 1024.0, 1024.0, 4096.0 * 1024.0)
RATE = 0.3  # share of an error that one measured step corrects
MAX_RATIO = 3.0  # a step that took longer than this many times what was expected counts as that long
TRUSTED_AFTER = 8  # measured steps; until then none is cut


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


class LearnedStepTime:
    """seconds = sum of coefficients * amounts, no coefficient below 0."""

    def __init__(self) -> None:
        self._coefficients = [0.0] * len(UNITS)
        self._num_learned = 0
        self.knows_prompts = False  # a step with prompt tokens was measured

    def decode_seconds(self, num_decodes: float, num_context: float) -> float:
        """A step of decodes alone."""
        return self._seconds((1.0, num_decodes, num_context, 0.0, 0.0))

    def prompt_seconds(self, num_tokens: float, num_scores: float) -> float:
        """What prompt chunks add to a step."""
        return self._seconds((0.0, 0.0, 0.0, num_tokens, num_scores))

    def seconds(self, work: StepWork) -> float:
        return self._seconds(_amounts(work))

    def _seconds(self, amounts: Seq[float]) -> float:
        return sum([c * amount / unit for c, amount, unit in zip(self._coefficients, amounts, UNITS, strict=True)])

    def learn(self, work: StepWork, seconds: float) -> None:
        amounts = _amounts(work)
        expected = self._seconds(amounts)
        self._num_learned += 1
        if self._num_learned > TRUSTED_AFTER:  # a kernel that is compiled, or a busy host, is no news about the device
            seconds = min(seconds, expected * MAX_RATIO)
        if work.num_prefill and not self.knows_prompts:  # all of the rest is the prompts', until more is known
            self.knows_prompts, amounts = True, (0.0, 0.0, 0.0, *amounts[3:])
        scaled = [amount / unit for amount, unit in zip(amounts, UNITS, strict=True)]
        change = RATE * (seconds - expected) / sum([value * value for value in scaled])
        if self._num_learned == 1 or not any(self._coefficients[3:]):
            change /= RATE
        self._coefficients = [max(0.0, c + change * value) for c, value in zip(self._coefficients, scaled, strict=True)]


def _amounts(work: StepWork) -> tuple[float, ...]:
    return (1.0, work.num_decodes, work.num_context, work.num_prefill, work.num_scores)
