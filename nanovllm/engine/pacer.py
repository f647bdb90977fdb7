"""How many prompt tokens a step takes while sequences decode, so that none of them waits long for its next token.

The rule:
1. A step lasts at most the target. Where prompts wait long, it lasts up to WAIT_SHARE of the time that the queue takes,
   at most MAX_STRETCH targets.
2. It may always last MIN_STRETCH times as long as its decodes alone, so that prompts get most of the device however
   many sequences decode. It takes at least MIN_TOKENS prompt tokens.
3. A burst of prompts is computed in steps of up to BURST_STRETCH targets, as long as these delay few tokens:
   BURST_TOKENS after a moment in which no sequence decoded, and BURST_SHARE of all tokens later.

Three numbers are learned from measured steps. The latest decode step says how long the decodes take; when it is old,
the next step takes no prompts, to measure it again. The prompt tokens per second in the rest of a step give the number
of tokens. If a full step takes longer than its limit, this rate falls, else it rises; it rests only where a step takes
as long as it may. So no formula has to know how the time depends on sequences, contexts and positions. The seconds per
prompt of the latest steps, times the prompts that wait, are the time that the queue takes.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.engine.step_work import StepWork, WorkCounter

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.plan import StepPlan

TARGET = 0.018  # seconds: shorter steps would compute prompts slowly, and no reader notices
WAIT_SHARE = 0.03  # this and the next constants: see the rule
MAX_STRETCH = 6.0
MIN_STRETCH = 2.7
MIN_TOKENS = 128
FIRST_TOKENS = 256  # before a step with prompt tokens was measured
MULTIPLE = 16  # of tokens
# a burst: so many prompts wait at least, and so many for each sequence that decodes
BURST_PROMPTS = 16
BURST_RATIO = 0.15
BURST_STRETCH = 20.0
BURST_TOKENS = 500.0
BURST_SHARE = 0.0005
MAX_BURST_STEPS = 20  # that BURST_TOKENS pay for, however few sequences decode
NEARLY = 0.9  # a step with this share of its limit says what a full one takes
MAX_CHANGE = 2.0  # factor by which one step may change the rate: a kernel that is compiled is no news about the device
OLD_STEPS = 32  # a decode step is old after so many steps with prompts,
OLD_RATIO = 1.5  # or when so many times more sequences decode
KEPT = 0.97  # weight of the earlier steps in the seconds per prompt


class Limit(NamedTuple):
    """What a step may take while sequences decode."""

    num_tokens: int  # of prompts
    seconds: float


class Pacer:
    def __init__(self, target: float = TARGET) -> None:
        """`target`: seconds that a step may take while few sequences decode and few prompts wait."""
        self.target = target
        self._decode_seconds = 0.0  # of the latest decode step,
        self._decode_size = 0.0  # and its sequences
        self._num_since = 0  # limits since then
        self._rate: float | None = None  # prompt tokens per second, in the time that the decodes leave
        self._seconds = self._num_prompts = 0.0  # of the latest steps with prompts: time, and prompts that they ended
        self._burst_tokens = BURST_TOKENS  # that a burst may delay now
        self.limit = Limit(FIRST_TOKENS, target)  # of the step that was scheduled last

    def num_prompt_tokens(self, *, num_decodes: int, num_waiting: int) -> int:
        """The most prompt tokens of the next step, in which so many sequences decode while so many prompts wait."""
        self._num_since += 1
        if self._rate is None:
            self.limit = Limit(FIRST_TOKENS, self.target)
        elif self._computes_burst(num_decodes, num_waiting):
            self.limit = self._limit(self._rate, BURST_STRETCH * self.target)
        elif self._num_since > OLD_STEPS or num_decodes > OLD_RATIO * self._decode_size:
            self._num_since, self._decode_size = 0, num_decodes
            self.limit = Limit(0, 0.0)
        else:
            wait = num_waiting * self._seconds / max(self._num_prompts, 1.0)
            seconds = min(max(WAIT_SHARE * wait, self.target), MAX_STRETCH * self.target)
            self.limit = self._limit(self._rate, seconds)
        return self.limit.num_tokens

    def _computes_burst(self, num_decodes: int, num_waiting: int) -> bool:
        cost = max(num_decodes, BURST_TOKENS / MAX_BURST_STEPS)
        if num_waiting < max(BURST_PROMPTS, BURST_RATIO * num_decodes) or self._burst_tokens < cost:
            return False
        self._burst_tokens -= cost
        return True

    def _limit(self, rate: float, seconds: float) -> Limit:
        seconds = max(seconds, MIN_STRETCH * self._decode_seconds)
        num_tokens = int(rate * (seconds - self._decode_seconds))
        return Limit(max(num_tokens // MULTIPLE * MULTIPLE, MIN_TOKENS), seconds)

    def clock(self, scheduler: "Scheduler") -> "StepClock":
        return StepClock(scheduler, self)

    def learn(self, work: StepWork, seconds: float, limit: Limit) -> None:
        """A step took this long; `limit` was its own."""
        earned = BURST_SHARE * work.num_decodes if work.num_decodes else BURST_TOKENS
        self._burst_tokens = min(self._burst_tokens + earned, BURST_TOKENS)
        if not work.num_prefill:
            self._num_since, self._decode_seconds, self._decode_size = 0, seconds, work.num_decodes
            return
        self._seconds = KEPT * self._seconds + seconds
        self._num_prompts = KEPT * self._num_prompts + work.num_sampled - work.num_decodes
        of_decodes = min(self._decode_seconds, 0.75 * seconds) if work.num_decodes else 0.0
        rate = work.num_prefill / (seconds - of_decodes)
        if self._rate is None:
            if work.num_prefill >= NEARLY * FIRST_TOKENS:
                self._rate = rate
        elif not work.num_decodes or not limit.num_tokens:
            return  # it had no limit, or its tokens are no prompt's: proposed ones are verified in the same way
        elif work.num_prefill >= NEARLY * limit.num_tokens or seconds > limit.seconds:
            self._rate = (self._rate + min(max(rate, self._rate / MAX_CHANGE), self._rate * MAX_CHANGE)) / 2


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
