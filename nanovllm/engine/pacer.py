"""How many prompt tokens a step takes while sequences decode, so that none of them waits long for its next token.

The rule: a step lasts at most the target. Where more than one prompt waits for every SHARE sequences that decode, it
lasts as many times longer, up to MAX_STRETCH: under overload, those that wait for their first token and those that wait
for their next one share the device. A step takes at least MIN_TOKENS prompt tokens, so that every prompt advances.

Two numbers are learned from measured steps. The time of a step of decodes gives the target, where the user gives none.
The prompt tokens per second of whole steps, decodes included, give the number of tokens: `rate * target`. If such a
step takes longer than its limit, the rate falls, else it rises; it rests only where a step takes as long as it may. So
no formula has to know how the time depends on sequences, contexts and positions.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.engine.step_work import StepWork, WorkCounter

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.plan import StepPlan

DECODE_STEPS = 5.0  # the target where none is given: as long as this many of the quickest steps of decodes,
MIN_TARGET = 0.02  # but so many seconds at least: shorter steps would compute prompts slowly, and no reader notices
FIRST_TARGET = 0.025  # before steps of decodes were measured
SHARE = 8.0
MAX_STRETCH = 3.0
MIN_TOKENS = 128
FIRST_TOKENS = 256  # before a step with prompt tokens was measured
MULTIPLE = 16  # of tokens
NEARLY = 0.9  # a step with this share of its limit says what a full one takes
MAX_CHANGE = 2.0  # factor by which one step may change the rate: a kernel that is compiled is no news about the device
SMOOTHING = 0.1  # weight of the newest step in the mean time of steps of decodes
ENOUGH_STEPS = 8  # for that mean to count


class Limit(NamedTuple):
    """What a step may take while sequences decode."""

    num_tokens: int  # of prompts
    seconds: float


class Pacer:
    def __init__(self, target: float | None = None) -> None:
        """`target`: seconds; None = derived from the quickest steps of decodes."""
        self._target = target
        self._rate: float | None = None  # prompt tokens per second
        self._mean, self._num_measured = 0.0, 0  # of steps of decodes
        self._quickest: float | None = None
        self.limit = Limit(FIRST_TOKENS, FIRST_TARGET)  # of the step that was scheduled last

    @property
    def target(self) -> float:
        """Seconds that a step with prompt tokens may take while sequences decode and few prompts wait."""
        if self._target is not None:
            return self._target
        return FIRST_TARGET if self._quickest is None else max(DECODE_STEPS * self._quickest, MIN_TARGET)

    def num_prompt_tokens(self, *, num_decodes: int, num_waiting: int) -> int:
        """The most prompt tokens of the next step, in which so many sequences decode while so many prompts wait."""
        seconds = self.target * min(max(SHARE * num_waiting / num_decodes, 1.0), MAX_STRETCH)
        num_tokens = FIRST_TOKENS
        if self._rate is not None:
            num_tokens = max(int(self._rate * seconds) // MULTIPLE * MULTIPLE, MIN_TOKENS)
        self.limit = Limit(num_tokens, seconds)
        return num_tokens

    def clock(self, scheduler: "Scheduler") -> "StepClock":
        return StepClock(scheduler, self)

    def learn(self, work: StepWork, seconds: float, limit: Limit) -> None:
        """A step took this long; `limit` was its own."""
        if not work.num_prefill:
            self._num_measured += 1
            self._mean += (seconds - self._mean) * max(SMOOTHING, 1 / self._num_measured)
            if self._num_measured >= ENOUGH_STEPS:
                self._quickest = self._mean if self._quickest is None else min(self._mean, self._quickest)
        elif self._rate is None:
            if work.num_prefill >= NEARLY * FIRST_TOKENS:
                self._rate = work.num_prefill / seconds
        elif work.num_decodes and (work.num_prefill >= NEARLY * limit.num_tokens or seconds > limit.seconds):
            measured = min(max(work.num_prefill / seconds, self._rate / MAX_CHANGE), self._rate * MAX_CHANGE)
            self._rate = (self._rate + measured) / 2


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
        self._running: deque[tuple[StepWork, Limit, float]] = deque()  # work, limit, time of launch
        self._last_end = 0.0

    def begins(self, plan: "StepPlan") -> None:
        """`plan` was scheduled and is launched now; on a CPU the launch is the whole step."""
        self._running.append((self._counter.count(plan, self._scheduler), self._pacer.limit, self._now()))

    def ended(self) -> None:
        """The result of the oldest running step has come."""
        work, limit, launched = self._running.popleft()
        now = self._now()
        self._pacer.learn(work, now - max(launched, self._last_end), limit)
        self._last_end = now
