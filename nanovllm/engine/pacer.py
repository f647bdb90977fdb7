"""How many prompt tokens a step takes while sequences decode, so that none of them waits long for its next token.

The rule:
1. A step lasts at most one target while no more than REQUESTS requests wait or run. With more of them this grows with
   the square of their number, up to MAX_STRETCH targets; also to WAIT_SHARE of the time that the queue takes, if that
   is longer. Under more load, first and next tokens both take longer.
2. It may always last MIN_STRETCH times as long as its decodes alone, so that prompts get most of a slow device. It
   takes at least MIN_TOKENS prompt tokens.
3. A burst of prompts is computed in steps of up to BURST_STRETCH targets, as long as these delay few tokens:
   BURST_TOKENS after a moment in which no sequence decoded, and BURST_SHARE of all tokens later.

Three numbers are learned from measured steps. The latest decode step says how long the decodes take; when it is old,
the next steps take no prompts, to measure it again. The prompt tokens per second in the rest of a step give the number
of tokens. If a full step takes longer than its limit, this rate falls, else it rises; it rests only where a step takes
as long as it may. So no formula has to know how the time depends on sequences, contexts and positions. The seconds per
prompt of the latest steps, times the prompts that wait, are the time that the queue takes.

A GPU runs beside the host, which sees the end of a step only if it waits for it. The host launches the kernels of a
step with prompts one by one, and is often late for the step before: that ended at an unknown time. Its own time, and
that of the step after it, is then known only to lie in an interval, and the rate changes no more than to fit into it.
Decodes are measured in two steps without prompts: during the first one the host launches the second, which is quick.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.engine.step_work import StepWork, WorkCounter

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.plan import StepPlan, StepResult

TARGET = 0.022  # seconds: shorter steps would compute prompts slowly, and no reader notices
REQUESTS = 170  # this and the next constants: see the rule
WAIT_SHARE = 0.02
MAX_STRETCH = 5.1
MIN_STRETCH = 2.7
MIN_TOKENS = 128
FIRST_TOKENS = 256  # before a step with prompt tokens was measured
MULTIPLE = 128  # of all tokens of a step: products have tiles of as many rows, and recorded steps such sizes
# a burst: so many prompts wait at least, and so many for each sequence that decodes
BURST_PROMPTS = 16
BURST_RATIO = 0.15
BURST_STRETCH = 16.0
BURST_TOKENS = 1000.0
BURST_SHARE = 0.0005
MAX_BURST_STEPS = 20  # that BURST_TOKENS pay for, however few sequences decode
NEARLY = 0.9  # a step with this share of its limit says what a full one takes
MAX_FALL = 1.25  # factor by which one step may lower the rate: a kernel that is compiled is no news about the device
LATE_RISE = 1.03  # factor by which the rate rises if the host was late: the step could have had more tokens
NUM_MEASURING = 2  # steps without prompts, to measure the decodes
OLD_STEPS = 100  # a decode step is old after so many steps with prompts,
OLD_RATIO = 2.0  # or when so many times more or fewer sequences decode
KEPT = 0.97  # weight of the earlier steps in the seconds per prompt
WAITED = 2e-4  # seconds: where the result took longer to come, the host was not late


class Limit(NamedTuple):
    """What a step may take while sequences decode."""

    num_tokens: int  # of prompts
    seconds: float


class Pacer:
    def __init__(self, target: float = TARGET) -> None:
        """`target`: seconds that a step may take while few sequences decode and few prompts wait."""
        self.target = target
        self._decode_seconds = 0.0  # of the latest decode step that was measured
        self._decode_size = 0  # sequences of the latest decode step
        self._num_since = 0  # limits since then
        self._num_measuring = 0  # steps without prompts that come next
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
            self.limit = self._limit(self._rate, BURST_STRETCH, num_decodes)
        elif self._measures_decodes(num_decodes):
            self.limit = Limit(0, 0.0)
        else:
            wait = num_waiting * self._seconds / max(self._num_prompts, 1.0)
            stretch = max(((num_decodes + num_waiting) / REQUESTS) ** 2, WAIT_SHARE * wait / self.target)
            stretch = min(max(stretch, 1.0), MAX_STRETCH)
            self.limit = self._limit(self._rate, stretch, num_decodes)
        return self.limit.num_tokens

    def _computes_burst(self, num_decodes: int, num_waiting: int) -> bool:
        cost = max(num_decodes, BURST_TOKENS / MAX_BURST_STEPS)
        if num_waiting < max(BURST_PROMPTS, BURST_RATIO * num_decodes) or self._burst_tokens < cost:
            return False
        self._burst_tokens -= cost
        return True

    def _measures_decodes(self, num_decodes: int) -> bool:
        of_same_size = self._decode_size / OLD_RATIO <= num_decodes <= self._decode_size * OLD_RATIO
        if not self._num_measuring and (self._num_since > OLD_STEPS or not of_same_size):
            self._num_measuring = NUM_MEASURING
        if not self._num_measuring:
            return False
        self._num_measuring -= 1
        self._num_since, self._decode_size = 0, num_decodes
        return True

    def _limit(self, rate: float, stretch: float, num_decodes: int) -> Limit:
        seconds = max(stretch * self.target, MIN_STRETCH * self._decode_seconds)
        num_tokens = rate * (seconds - self._decode_seconds)
        least = -(-(MIN_TOKENS + num_decodes) // MULTIPLE)
        of_step = max(int(num_tokens + num_decodes) // MULTIPLE, least) * MULTIPLE
        return Limit(of_step - num_decodes, seconds)

    def clock(self, scheduler: "Scheduler", *, beside_host: bool) -> "StepClock":
        return StepClock(scheduler, self, beside_host=beside_host)

    def learn(self, work: StepWork, seconds: float, limit: Limit, *, at_least: float | None = None) -> None:
        """A step took this long, or between `at_least` and this; `limit` was its own.

        `at_least` is 0 if the host was late for its end, and None if the time is exact.
        """
        at_least = seconds if at_least is None else at_least
        earned = BURST_SHARE * work.num_decodes if work.num_decodes else BURST_TOKENS
        self._burst_tokens = min(self._burst_tokens + earned, BURST_TOKENS)
        if not work.num_prefill:
            self._num_since, self._decode_size = 0, int(work.num_decodes)
            if at_least == seconds:
                self._decode_seconds = seconds
            return
        self._seconds = KEPT * self._seconds + seconds
        self._num_prompts = KEPT * self._num_prompts + work.num_sampled - work.num_decodes
        if self._rate is None:
            if work.num_prefill >= NEARLY * FIRST_TOKENS:
                self._rate = self._rate_of(work, seconds)
        elif not work.num_decodes or not limit.num_tokens:
            return  # it had no limit, or its tokens are no prompt's: proposed ones are verified in the same way
        elif work.num_prefill >= NEARLY * limit.num_tokens or at_least > limit.seconds:
            highest = self._rate_of(work, at_least) if at_least else None
            self._rate = _changed_rate(self._rate, self._rate_of(work, seconds), highest)

    def _rate_of(self, work: StepWork, seconds: float) -> float:
        of_decodes = min(self._decode_seconds, 0.75 * seconds) if work.num_decodes else 0.0
        return work.num_prefill / (seconds - of_decodes)


def _changed_rate(rate: float, lowest: float, highest: float | None) -> float:
    """The rate after a full step that shows it to be between these two; None: the host was late for its end."""
    if highest is None:
        return max(LATE_RISE * rate, (rate + lowest) / 2)
    if highest < rate:
        return max(highest, rate / MAX_FALL)
    return max(rate, (rate + lowest) / 2)


def make_pacer(target_itl_ms: float | None, *, serves: bool) -> Pacer | None:
    """The pacer of the option of this name. Where it is None, only an engine that serves clients has one."""
    if target_itl_ms is None:
        return Pacer() if serves else None
    return Pacer(target_itl_ms / 1e3) if target_itl_ms else None


class StepClock:
    """Measures the steps of an engine for its pacer. They run one after the other, each from its launch, or from the
    end of the one before, to its own end."""

    def __init__(
        self, scheduler: "Scheduler", pacer: Pacer, *, beside_host: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`beside_host`: steps run while the host works, else their launch is the whole step."""
        self._scheduler = scheduler
        self._pacer = pacer
        self._beside_host = beside_host
        self._now = now
        self._counter = WorkCounter()
        self._running: deque[tuple[StepWork, Limit, float]] = deque()  # work, limit, time of launch
        self._last_end = 0.0
        self._last_end_is_exact = True  # else that step ended earlier

    def begins(self, plan: "StepPlan") -> None:
        """`plan` was scheduled and is launched now."""
        self._running.append((self._counter.count(plan, self._scheduler), self._pacer.limit, self._now()))

    def result_of(self, wait: Callable[[], "StepResult"]) -> "StepResult":
        """The result of the oldest running step, for which `wait` waits."""
        asked = self._now()
        result = wait()
        end = self._now()
        work, limit, launched = self._running.popleft()
        begin = max(launched, self._last_end)
        seconds = end - (begin if self._last_end_is_exact else launched)
        is_exact = not self._beside_host or end - asked > WAITED
        self._pacer.learn(work, seconds, limit, at_least=end - begin if is_exact else 0.0)
        self._last_end, self._last_end_is_exact = end, is_exact
        return result
