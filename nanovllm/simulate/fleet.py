"""Simulates replicas with a routing policy. Events are the arrival of a request and the end of a replica's step.

At each time, first the steps that end deliver their tokens, then arriving requests are routed, then every idle replica
with requests begins its next step. The result is deterministic and does not depend on the machine.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, isnan, nan

from nanovllm.config import SchedulerConfig
from nanovllm.engine.pacer import make_pacer
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestError
from nanovllm.remote.routing import Policy
from nanovllm.sampling_params import SamplingParams
from nanovllm.simulate.replica import Replica
from nanovllm.simulate.requests import Arrival
from nanovllm.simulate.step_time import StepTime

PARAMS = SamplingParams(ignore_eos=True)  # the output length is set per sequence


@dataclass
class Outcome:
    """Times and counts of each request, in the order of arrival; the times of a refused request are nan."""

    arrivals: Seq[Arrival]
    first_token: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)  # prompt tokens found in the prefix cache
    replica: list[int] = field(default_factory=list)
    decode_gaps: list[tuple[float, int]] = field(default_factory=list)  # seconds between two tokens, and how often
    # per replica
    busy_seconds: list[float] = field(default_factory=list)
    num_preemptions: list[int] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)


class Fleet:
    """`policy` identifies the replicas by the numbers 0, 1, ..."""

    def __init__(
        self,
        *,
        num_replicas: int,
        config: SchedulerConfig,
        step_time: StepTime,
        policy: Policy,
        target_itl_ms: float | None = 0.0,  # the engine's option; None = its default in a server
    ) -> None:
        self.replicas = [
            Replica(config, step_time, make_pacer(target_itl_ms, serves=True)) for _ in range(num_replicas)
        ]
        self.policy = policy
        self._steps: list[tuple[float, int]] = []  # a heap of (when the step ends, replica)

    def run(self, arrivals: Seq[Arrival]) -> Outcome:
        """Simulate until all requests have ended. `arrivals` must be ordered by time."""
        count = len(arrivals)
        outcome = Outcome(arrivals, [nan] * count, [nan] * count, [0] * count, [-1] * count)
        coming = 0
        while self._steps or coming < count:
            now = min(
                self._steps[0][0] if self._steps else inf,
                arrivals[coming].seconds if coming < count else inf,
            )
            woken = self._end_steps(now, outcome)
            while coming < count and arrivals[coming].seconds <= now:
                woken.add(self._route(coming, outcome))
                coming += 1
            self._begin_steps(now, woken)
        outcome.decode_gaps = [gap for replica in self.replicas for gap in replica.decode_gaps]
        outcome.busy_seconds = [replica.busy_seconds for replica in self.replicas]
        outcome.num_preemptions = [replica.scheduler.num_preemptions for replica in self.replicas]
        outcome.num_steps = [replica.num_steps for replica in self.replicas]
        return outcome

    def _end_steps(self, now: float, outcome: Outcome) -> set[int]:
        woken: set[int] = set()
        while self._steps and self._steps[0][0] <= now:
            _, index = heappop(self._steps)
            end = self.replicas[index].end_step()
            for seq in end.sampled:
                if isnan(outcome.first_token[seq.arrival]):  # after a preemption the prompt is computed again
                    outcome.first_token[seq.arrival] = now
            for seq in end.ended:
                outcome.ended[seq.arrival] = now
                outcome.num_cached[seq.arrival] = seq.num_cached_tokens
                self.policy.finished(index)
            woken.add(index)
        return woken

    def _route(self, number: int, outcome: Outcome) -> int:
        arrival = outcome.arrivals[number]
        prompt = arrival.prompt()
        index = self.policy.route(prompt)
        assert isinstance(index, int)
        seq = Sequence(str(number), prompt, PARAMS, max_num_tokens=len(prompt) + arrival.output_len, arrival=number)
        try:
            self.replicas[index].scheduler.add(seq)
            outcome.replica[number] = index
        except RequestError:
            self.policy.finished(index)
        return index

    def _begin_steps(self, now: float, woken: set[int]) -> None:
        for index in sorted(woken):
            replica = self.replicas[index]
            if not replica.is_running and replica.has_work:
                heappush(self._steps, (now + replica.begin_step(), index))
