"""How many prompt tokens a step takes while sequences decode, so that none of them waits long for its next token.

The rule: a step lasts at most the target, by the step times learned so far. Where more than one prompt waits for every
SHARE sequences that decode, it lasts as many times longer, up to MAX_STRETCH: under overload, those that wait for their
first token and those that wait for their next one share the device. A step takes at least MIN_TOKENS prompt tokens, so
that every prompt advances.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from nanovllm.engine.step_time import LearnedStepTime, StepWork, WorkCounter

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence
    from nanovllm.plan import StepPlan

DECODE_STEPS = 5.0  # the target where none is given: as long as this many of the quickest steps of decodes,
MIN_TARGET = 0.02  # but so many seconds at least: shorter steps would compute prompts slowly, and no reader notices
FIRST_TARGET = 0.025  # before a step of decodes was measured
SHARE = 8.0
MAX_STRETCH = 3.0
MIN_TOKENS = 128
FIRST_TOKENS = 1024  # before a step with prompt tokens was measured
MULTIPLE = 64  # of tokens
SMOOTHING = 0.1  # weight of the newest step in the mean time of steps of decodes
ENOUGH_STEPS = 8  # for that mean to count


class Pacer:
    def __init__(self, target: float | None = None) -> None:
        """`target`: seconds; None = derived from the quickest steps of decodes."""
        self._target = target
        self.step_time = LearnedStepTime()
        self._mean, self._num_measured = 0.0, 0  # of steps of decodes
        self._quickest: float | None = None

    @property
    def target(self) -> float:
        """Seconds that a step with prompt tokens may take while sequences decode and few prompts wait."""
        if self._target is not None:
            return self._target
        return FIRST_TARGET if self._quickest is None else max(DECODE_STEPS * self._quickest, MIN_TARGET)

    def num_prompt_tokens(self, decodes: Seq["Sequence"], *, num_waiting: int, start: int) -> int:
        """The most prompt tokens of a step in which `decodes` take part.

        `num_waiting`: prompts that are not computed yet. `start`: position at which the first of them continues.
        """
        if not self.step_time.knows_prompts:
            return FIRST_TOKENS
        num_context = sum([seq.num_computed_tokens for seq in decodes])
        stretch = min(max(SHARE * num_waiting / max(len(decodes), 1), 1.0), MAX_STRETCH)
        seconds = stretch * self.target - self.step_time.decode_seconds(len(decodes), num_context)
        num_tokens = int(seconds / max(self.step_time.prompt_seconds(1.0, start), 1e-9))
        return max(num_tokens // MULTIPLE * MULTIPLE, MIN_TOKENS)

    def clock(self, scheduler: "Scheduler") -> "StepClock":
        return StepClock(scheduler, self)

    def learn(self, work: StepWork, seconds: float) -> None:
        """A step took this long."""
        self.step_time.learn(work, seconds)
        if work.num_prefill:
            return
        self._num_measured += 1
        self._mean += (seconds - self._mean) * max(SMOOTHING, 1 / self._num_measured)
        if self._num_measured >= ENOUGH_STEPS:
            self._quickest = self._mean if self._quickest is None else min(self._mean, self._quickest)


def make_pacer(target_itl_ms: float | None, *, serves: bool) -> Pacer | None:
    """The pacer of the option of this name. Where it is None, only an engine that serves clients has one."""
    if target_itl_ms is None:
        return Pacer() if serves else None
    return Pacer(target_itl_ms / 1e3) if target_itl_ms else None


class StepClock:
    """Measures the steps of an engine for its pacer. Steps run one after the other, each from its launch, or from the
    end of the one before, to its result."""

    def __init__(self, scheduler: "Scheduler", pacer: Pacer, now: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._pacer = pacer
        self._now = now
        self._counter = WorkCounter()
        self._running: deque[tuple[StepWork, float]] = deque()  # work and time of launch
        self._last_end = 0.0

    def launched(self, plan: "StepPlan") -> None:
        """`plan` was scheduled and launched."""
        self._running.append((self._counter.count(plan, self._scheduler), self._now()))

    def ended(self) -> None:
        """The result of the oldest running step has come."""
        work, launched = self._running.popleft()
        now = self._now()
        self._pacer.learn(work, now - max(launched, self._last_end))
        self._last_end = now
