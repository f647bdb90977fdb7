"""Simulates a server under load with the engine's scheduler and pacer: clients, the host, and a GPU beside it.

`nanovllm simulate` leaves out the host's time. Here it counts, because the pacer has to see through it: the kernels of
a large step are launched one by one, which takes longer than a decode step, and the host reads a step's tokens only
after it has launched the next step. The constants give the times measured with Qwen3-8B on an H200 of the slower kind
(750 TFLOP/s in large products): decode steps of 7.0, 12.9 and 40.5 ms at 80, 256 and 890 sequences of 576 tokens, steps
with prompts of 20, 47 and 110 ms for 768, 1,920 and 4,352 tokens, and 48,000 prompt tokens/s; the host launches a step
with prompts in 2.5 ms if it was recorded, else in 20 ms, and spends 11 us on each token that it reads.

`python -m tests.engine.paced_loads` prints throughput and latencies of the loads in docs/performance.md.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from nanovllm.bench.traces import arrivals, random_requests
from nanovllm.config import SchedulerConfig
from nanovllm.engine.pacer import Pacer, StepClock
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_work import StepWork, WorkCounter
from nanovllm.plan import StepPlan, StepResult
from nanovllm.runner.prompt_graphs import MOST_TOKENS
from nanovllm.sampling_params import SamplingParams
from nanovllm.state import BlockGroup

CONFIG = SchedulerConfig(
    max_num_batched_tokens=16_896,
    max_num_seqs=1024,
    max_model_len=8192,
    block_size=32,
    groups=(BlockGroup(24_000),),
    enable_prefix_caching=False,
)
PARAMS = SamplingParams(ignore_eos=True)
LINEAR_ROWS = 128
# of the products of one layer with 0, 128, 256, ... rows: more rows that fit into the same waves of tiles cost nothing
LINEAR_MICROSECONDS = (
    *(98, 123, 161, 215, 258, 351, 397, 537, 546, 612, 698),
    *(725, 842, 915, 1053, 1030, 1115, 1200, 1272, 1350, 1420),
)


@dataclass(frozen=True)
class Host:
    """Times of the engine's process and of the way to the client and back, in seconds."""

    launch_recorded: float = 0.0025  # with prompts
    launch_prompts: float = 0.020
    launch_decodes: float = 0.0005
    schedule: float = 0.0003
    per_token: float = 11e-6  # that is read, made text and sent
    add_request: float = 0.0003
    parse_request: float = 0.002  # in the server's process, one after the other
    network: float = 0.003


@dataclass
class Gpu:
    """The time of a step; `slowness` multiplies it."""

    slowness: float = 1.0
    noise: float = 0.02
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    def seconds(self, work: StepWork) -> float:
        num_tokens = work.num_prefill + work.num_decodes
        recorded = work.num_prefill > 0 and num_tokens <= MOST_TOKENS  # and so padded
        rows = -(-num_tokens // LINEAR_ROWS) * LINEAR_ROWS if recorded else num_tokens
        if rows < LINEAR_ROWS * len(LINEAR_MICROSECONDS):
            linears = 36e-6 * float(np.interp(rows / LINEAR_ROWS, range(len(LINEAR_MICROSECONDS)), LINEAR_MICROSECONDS))
        else:
            linears = 19.9e-6 * rows
        head = max(0.31e-3, 1.9e-6 * work.num_sampled)
        attention = 41e-9 * work.num_context + 0.98e-9 * work.num_scores
        others = 1.6e-3 + 1e-6 * num_tokens if work.num_prefill else 0.35e-3
        exact = linears + head + attention + others
        return self.slowness * exact * (1 + self._rng.uniform(-self.noise, self.noise))


@dataclass(frozen=True)
class Load:
    """Requests as (prompt tokens, output tokens), sent at `times`, or by clients that wait for each answer."""

    requests: Seq[tuple[int, int]]
    times: Seq[float] | None = None
    num_clients: int = 0


@dataclass
class Times:
    """When each request was sent and its latest token came; the time to each first token, and between tokens."""

    sent: list[float]
    latest: list[float]
    to_first: dict[int, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def row(self, num_tokens: int) -> dict[str, float]:
        seconds = max(self.latest) - min(self.sent)
        ttft, itl = 1e3 * np.array([*self.to_first.values()]), 1e3 * np.array(self.gaps)
        percentiles = {
            f"{name}_p{percent}_ms": float(np.percentile(values, percent))
            for name, values in (("ttft", ttft), ("itl", itl))
            for percent in (50, 99)
        }
        return {"tok_per_s": num_tokens / seconds, **percentiles}


class Server:
    """An engine whose steps overlap, as `EngineCore` runs them, and the clock on the wall."""

    def __init__(self, load: Load, pacer: Pacer, gpu: Gpu, host: Host) -> None:
        self.load, self.gpu, self.host = load, gpu, host
        self.scheduler = Scheduler(CONFIG, pacer=pacer)
        self.clock = StepClock(self.scheduler, pacer, beside_host=True, now=lambda: self.now)
        self.now = self.gpu_free = self.parser_free = 0.0
        self.pending: deque[tuple[StepPlan, float]] = deque()  # launched steps, and when they end
        self.arriving: list[tuple[float, int]] = []
        self.counter = WorkCounter()
        count = len(load.requests)
        self.times = Times([math.nan] * count, [math.nan] * count)
        self.num_sent = 0
        for number in range(count if load.times is not None else min(count, load.num_clients)):
            self.send(load.times[number] if load.times is not None else 0.0)

    def send(self, at: float) -> None:
        """Send the next request."""
        self.times.sent[self.num_sent] = at
        self.parser_free = max(self.parser_free, at) + self.host.parse_request
        heapq.heappush(self.arriving, (self.parser_free + self.host.network, self.num_sent))
        self.num_sent += 1

    def run(self) -> Times:
        while self.arriving or self.pending or self.scheduler.num_unfinished:
            self.add_arrived()
            plan = self.scheduler.schedule() if self.scheduler.num_unfinished else None
            if plan is not None:
                self.launch(plan)
            elif not self.pending:
                self.now = max(self.now, self.arriving[0][0])
            if self.pending and (plan is None or len(self.pending) > 1):
                self.take_in()
        return self.times

    def add_arrived(self) -> None:
        while self.arriving and self.arriving[0][0] <= self.now:
            _, number = heapq.heappop(self.arriving)
            prompt, output = self.load.requests[number]
            seq = Sequence(str(number), [7] * prompt, PARAMS, max_num_tokens=prompt + output, arrival=number)
            self.scheduler.add(seq)
            self.now += self.host.add_request

    def launch(self, plan: StepPlan) -> None:
        self.now += self.host.schedule
        self.clock.begins(plan)
        begin = max(self.now, self.gpu_free)
        work = self.counter.count(plan, self.scheduler)
        if not work.num_prefill:
            self.now += self.host.launch_decodes
        elif work.num_prefill + work.num_decodes <= MOST_TOKENS:
            self.now += self.host.launch_recorded
        else:
            self.now += self.host.launch_prompts
        self.gpu_free = max(begin + self.gpu.seconds(work), self.now)
        self.pending.append((plan, self.gpu_free))

    def take_in(self) -> None:
        plan, end = self.pending.popleft()
        step = self.scheduler.in_flight[0]
        sampled = [row.seq for row in step.rows if row.step.num_sampled]
        receiving = [seq for seq in step.decodes if not seq.finished] + sampled
        result = StepResult(tokens=[[5]] * (len(step.decodes) + len(sampled)))
        self.clock.result_of(lambda: self.wait_until(end, result))
        self.now += self.host.per_token * len(receiving)
        ended = self.scheduler.update(plan, result)
        came = self.now + self.host.network
        for number in [seq.arrival for seq in receiving]:
            if number in self.times.to_first:
                self.times.gaps.append(came - self.times.latest[number])
            else:
                self.times.to_first[number] = came - self.times.sent[number]
            self.times.latest[number] = came
        if self.load.times is None:
            for _ in range(min(len(ended), len(self.load.requests) - self.num_sent)):
                self.send(came)

    def wait_until(self, end: float, result: StepResult) -> StepResult:
        self.now = max(self.now, end)
        return result


def simulated(load: Load, pacer: Pacer, *, gpu: Gpu | None = None, host: Host = Host()) -> dict[str, float]:
    """Throughput and latencies of a load."""
    times = Server(load, pacer, gpu or Gpu(), host).run()
    return times.row(sum(output for _, output in load.requests))


def bench_load(*, rate: float | None = None, num_clients: int = 0, count: int = 1000) -> Load:
    """The load of `nanovllm bench serve --random-input-len 512 --random-output-len 128`, with a closed loop or with a
    rate and --random-range-ratio 0.2."""
    ratio = 0.0 if rate is None else 0.2
    chosen = random_requests(count=count, input_len=512, output_len=128, range_ratio=ratio, seed=0)
    lengths = [(len(request.make_prompt()), request.output_len) for request in chosen]
    times = None if rate is None else arrivals(count, rate=rate, burstiness=1.0, seed=0)
    return Load(lengths, times, num_clients)


if __name__ == "__main__":
    loads = {
        "256 clients": bench_load(num_clients=256),
        "48 requests/s": bench_load(rate=48),
        "96 requests/s": bench_load(rate=96),
    }
    for name, each in loads.items():
        found = simulated(each, Pacer())
        print(f"{name:14}", "  ".join(f"{title} {value:.0f}" for title, value in found.items()))
