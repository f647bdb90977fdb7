"""Steps with prompts last about as long as the target while sequences decode, whatever the device and the load."""

import random
import time
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import SchedulerConfig
from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.pacer import (
    BURST_PROMPTS,
    BURST_RATIO,
    BURST_SHARE,
    BURST_STRETCH,
    BURST_TOKENS,
    FIRST_TOKENS,
    KEPT,
    LATE_RISE,
    MAX_BURST_STEPS,
    MAX_STRETCH,
    MIN_STRETCH,
    MIN_TOKENS,
    MULTIPLE,
    NUM_MEASURING,
    OLD_RATIO,
    OLD_STEPS,
    REQUESTS,
    TARGET,
    WAIT_SHARE,
    Limit,
    Pacer,
    StepClock,
)
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_work import StepWork, WorkCounter
from nanovllm.plan import StepResult
from nanovllm.runner import prompt_graphs
from nanovllm.sampling_params import SamplingParams
from nanovllm.state import BlockGroup
from tests.engine.paced_loads import Gpu, Host, bench_load, simulated
from tests.helpers import greedy_params, model_dir, open_llm, prompt_of

CONFIG = SchedulerConfig(
    max_num_batched_tokens=8192,
    max_num_seqs=64,
    max_model_len=16384,
    block_size=32,
    groups=(BlockGroup(10_000),),
    enable_prefix_caching=False,
)
LEARNING = 20  # steps with prompts, after which a prediction must be good


@dataclass(frozen=True)
class Device:
    """How long steps take, in seconds."""

    step: float
    token: float
    context_token: float = 0.0
    score: float = 0.0
    free: float = 0.0  # share of `step` in which tokens are computed at no cost, while weights are read
    noise: float = 0.0

    def seconds(self, work: StepWork, rng: random.Random) -> float:
        exact = self.step + max(self.token * (work.num_prefill + work.num_decodes) - self.free * self.step, 0.0)
        exact += self.context_token * work.num_context + self.score * work.num_scores
        return exact * (1 + rng.uniform(-self.noise, self.noise))


H200 = Device(step=4.3e-3, token=25e-6, context_token=37e-9, score=0.9e-9, free=0.9)
devices = st.builds(
    Device,
    step=st.floats(1e-3, 0.05),
    token=st.floats(2e-6, 2e-4),
    context_token=st.floats(0, 1e-7),
    score=st.floats(0, 2e-9),
    free=st.sampled_from((0.0, 0.5, 0.9)),
    noise=st.sampled_from((0.0, 0.1)),
)


@dataclass(frozen=True)
class Step:
    work: StepWork
    seconds: float
    of_decodes: float  # seconds that its decodes alone would take
    allowed: float  # seconds by the first two points of the rule
    in_burst: bool


def run(device: Device, pacer: Pacer, arrivals: list[tuple[float, int, int]], seed: int = 0) -> list[Step]:
    """All steps of a load; an arrival is (time, prompt tokens, output tokens)."""
    rng, counter, now = random.Random(seed), WorkCounter(), 0.0
    scheduler = Scheduler(CONFIG, pacer=pacer)
    waiting = [
        (time, Sequence(str(number), [7] * prompt, SamplingParams(), max_num_tokens=prompt + output, arrival=number))
        for number, (time, prompt, output) in enumerate(sorted(arrivals))
    ]
    steps: list[Step] = []
    time_of_prompts = num_prompts = 0.0  # of steps with prompts, weighted as the pacer does
    while waiting or scheduler.num_unfinished:
        if not scheduler.num_unfinished:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            scheduler.add(waiting.pop(0)[1])
        num_waiting, num_decodes = len(scheduler.waiting) + len(scheduler.prefilling), len(scheduler.decoding)
        wait = num_waiting * time_of_prompts / max(num_prompts, 1.0)
        stretch = max((num_decodes + num_waiting) / REQUESTS, WAIT_SHARE * wait / pacer.target)
        usual = pacer.target * min(max(stretch, 1.0), MAX_STRETCH)
        plan = scheduler.schedule()
        assert plan is not None
        work = counter.count(plan, scheduler)
        seconds = device.seconds(work, rng)
        now += seconds
        of_decodes = device.seconds(work._replace(num_prefill=0, num_scores=0), random.Random(0))
        allowed = max(usual, MIN_STRETCH * of_decodes)
        in_burst = num_waiting >= max(BURST_PROMPTS, BURST_RATIO * num_decodes)
        steps.append(Step(work, seconds, of_decodes, allowed, in_burst))
        num_sampled = len(plan.decode_rows) + sum(row.num_sampled for row in plan.row_steps)
        scheduler.update(plan, StepResult(tokens=[[5]] * num_sampled))
        pacer.learn(work, seconds, pacer.limit)
        if work.num_prefill:
            time_of_prompts = KEPT * time_of_prompts + seconds
            num_prompts = KEPT * num_prompts + work.num_sampled - work.num_decodes
    check_scheduler(scheduler)
    return steps


def poisson(rng: random.Random, *, rate: float, count: int, prompt: int, output: int) -> list[tuple[float, int, int]]:
    time, found = 0.0, []
    for _ in range(count):
        time += rng.expovariate(rate)
        found.append((time, rng.randint(1, 2 * prompt), rng.randint(2, 2 * output)))
    return found


@settings(max_examples=20, deadline=None, derandomize=True)
@given(device=devices, seed=st.integers(0, 99), load=st.floats(0.2, 1.5))
def test_no_sequence_waits_longer_than_the_rule_says(device: Device, seed: int, load: float) -> None:
    prompt, output = 600, 40
    capacity = 1 / (device.token * prompt + device.step * output / 16)  # requests/s that this device can serve, about
    arrivals = poisson(random.Random(seed), rate=load * capacity, count=60, prompt=prompt, output=output)
    steps = run(device, Pacer(), arrivals, seed)
    assert sum(step.work.num_prefill for step in steps) == sum(prompt for _, prompt, _ in arrivals)
    assert sum(step.work.num_sampled for step in steps) == sum(output for _, _, output in arrivals)
    num_mixed, num_late, num_late_allowed = 0, 0.0, BURST_TOKENS
    for step in steps:
        num_late_allowed += BURST_SHARE * step.work.num_decodes if step.work.num_decodes else BURST_TOKENS
        if step.work.num_prefill and step.work.num_decodes:
            num_mixed += 1
            if num_mixed <= LEARNING or step.work.num_prefill < MIN_TOKENS + MULTIPLE:
                continue
            if step.seconds >= 1.4 * step.allowed + step.of_decodes:
                assert step.in_burst and step.seconds < 1.4 * BURST_STRETCH * TARGET + step.of_decodes
                num_late += step.work.num_decodes
        elif step.work.num_prefill:
            assert step.work.num_prefill <= CONFIG.max_num_batched_tokens
    assert num_late <= num_late_allowed


def test_a_load_on_an_h200() -> None:
    """On the times of Qwen3-8B, prompts of 2,000 tokens no longer delay tokens by their whole step."""
    arrivals = poisson(random.Random(1), rate=10, count=150, prompt=2000, output=128)

    def itl_p99(pacer: Pacer) -> float:
        steps = run(replace(H200, noise=0.05), pacer, arrivals)
        gaps = sorted(step.seconds for step in steps for _ in range(int(step.work.num_decodes)))
        return gaps[int(0.99 * len(gaps))]

    assert itl_p99(Pacer()) < 0.5 * itl_p99(Pacer(10.0))


def test_steps_without_decodes_are_as_large_as_the_budget() -> None:
    steps = run(H200, Pacer(0.001), [(0.0, 16000, 1)])
    assert [step.work.num_prefill for step in steps] == [8192, 16000 - 8192]


def decode(pacer: Pacer, seconds: float = 0.006, num_decodes: int = 20) -> None:
    pacer.learn(StepWork(0, num_decodes, num_decodes, 100 * num_decodes, 0), seconds, pacer.limit)


def seconds_of(num_tokens: int) -> float:
    """6 ms for 20 decodes and 20 us for each prompt token."""
    return 0.006 + 20e-6 * num_tokens


def chunk(pacer: Pacer, seconds: float | None = None) -> tuple[int, float]:
    """A full step with 20 decodes, which takes `seconds` if given: prompt tokens and seconds."""
    decode(pacer)
    num_tokens = pacer.num_prompt_tokens(num_decodes=20, num_waiting=1)
    seconds = seconds or seconds_of(num_tokens)
    pacer.learn(StepWork(num_tokens, 20, 21, 2000, num_tokens**2 / 2), seconds, pacer.limit)
    return num_tokens, seconds


def trained(target: float = TARGET) -> Pacer:
    pacer = Pacer(target)
    for _ in range(30):
        chunk(pacer)
    return pacer


def test_the_first_steps_and_the_least_tokens() -> None:
    pacer = Pacer(1e-6)
    chunk(pacer)
    decode(pacer, 1e-6)
    assert MIN_TOKENS <= pacer.num_prompt_tokens(num_decodes=20, num_waiting=1) < MIN_TOKENS + MULTIPLE
    assert Pacer().num_prompt_tokens(num_decodes=20, num_waiting=1) == FIRST_TOKENS


def test_full_steps_have_the_sizes_of_recorded_ones() -> None:
    pacer = trained(0.1)
    decode(pacer)
    assert (pacer.num_prompt_tokens(num_decodes=20, num_waiting=1) + 20) % prompt_graphs.MULTIPLE == 0


def test_prompts_get_most_of_the_device_however_long_the_decodes_take() -> None:
    pacer = trained()
    decode(pacer, 0.1)
    pacer.num_prompt_tokens(num_decodes=20, num_waiting=1)
    assert pacer.limit.seconds == pytest.approx(MIN_STRETCH * 0.1)
    assert pacer.limit.num_tokens == pytest.approx((MIN_STRETCH - 1) * 0.1 / 20e-6, rel=0.1)


def test_many_requests_lengthen_steps() -> None:
    pacer = trained()
    limits = []
    for num_decodes, num_waiting in ((20, 1), (20, 9), (2 * REQUESTS, REQUESTS // 10), (10_000, 1)):
        decode(pacer, num_decodes=num_decodes)
        pacer.num_prompt_tokens(num_decodes=num_decodes, num_waiting=num_waiting)
        limits.append(pacer.limit.seconds / TARGET)
    assert limits == pytest.approx([1, 1, 2.1**2, MAX_STRETCH], rel=0.01)


def test_a_long_queue_lengthens_steps() -> None:
    """`trained` ends one prompt in each step of 18 ms; here a prompt takes half a second."""
    pacer = trained()
    for _ in range(200):
        pacer.num_prompt_tokens(num_decodes=20, num_waiting=1)
        pacer.learn(StepWork(100, 20, 21, 2000, 0), 0.5, pacer.limit)
    limits = []
    for num_waiting in (1, 5, 15):
        decode(pacer)
        pacer.num_prompt_tokens(num_decodes=20, num_waiting=num_waiting)
        limits.append(pacer.limit.seconds)
    assert limits == pytest.approx([TARGET, 5 * 0.5 * WAIT_SHARE, MAX_STRETCH * TARGET], rel=0.1)


def test_a_burst_delays_few_tokens() -> None:
    pacer = trained()

    def num_long(num_decodes: int, num_waiting: int) -> int:
        decode(pacer, num_decodes=num_decodes)
        limits = []
        for _ in range(2 * MAX_BURST_STEPS):
            pacer.num_prompt_tokens(num_decodes=num_decodes, num_waiting=num_waiting)
            limits.append(pacer.limit.seconds)
        return sum(limit >= BURST_STRETCH * TARGET for limit in limits)

    assert num_long(4, BURST_PROMPTS - 1) == 0
    assert num_long(4, BURST_PROMPTS) == MAX_BURST_STEPS
    assert num_long(200, 200) == 0
    pacer.learn(StepWork(1000, 0, 1, 0, 500_000), 0.02, pacer.limit)  # nobody decoded
    assert num_long(200, 20) == 0
    assert num_long(200, 200) == BURST_TOKENS // 200


def test_old_decode_steps_are_measured_again() -> None:
    pacer = trained()
    decode(pacer)
    found = [pacer.num_prompt_tokens(num_decodes=20, num_waiting=1) for _ in range(3 * OLD_STEPS)]
    first = [OLD_STEPS, 2 * OLD_STEPS + NUM_MEASURING]
    assert [number for number, tokens in enumerate(found) if not tokens] == [
        number + offset for number in first for offset in range(NUM_MEASURING)
    ]


@pytest.mark.parametrize(("least", "too_many"), [(20 * OLD_RATIO, 1), (20 / OLD_RATIO, -1)])
def test_decodes_of_another_size_are_measured(least: float, too_many: int) -> None:
    pacer = trained()
    decode(pacer)
    assert pacer.num_prompt_tokens(num_decodes=int(least), num_waiting=1)
    for _ in range(NUM_MEASURING):
        assert not pacer.num_prompt_tokens(num_decodes=int(least) + too_many, num_waiting=1)
    assert pacer.num_prompt_tokens(num_decodes=int(least) + too_many, num_waiting=1)


@pytest.mark.parametrize("target", [0.018, 0.025, 0.1])
def test_steps_take_as_long_as_they_may(target: float) -> None:
    pacer = Pacer(target)
    num_tokens, seconds = [chunk(pacer) for _ in range(30)][-1]
    assert (num_tokens + 20) % MULTIPLE == 0
    assert seconds <= target < seconds_of(num_tokens + MULTIPLE)


def test_small_chunks_say_nothing() -> None:
    pacer = Pacer(0.025)
    before = [chunk(pacer) for _ in range(30)][-1]
    for _ in range(50):  # the ends of prompts, in steps whose time is that of the decodes
        pacer.num_prompt_tokens(num_decodes=20, num_waiting=1)
        pacer.learn(StepWork(10, 20, 21, 2000, 55), 0.0062, pacer.limit)
    assert chunk(pacer) == before


def test_one_slow_step_changes_little() -> None:
    """A kernel was compiled, or the host was busy."""
    pacer = Pacer(0.1)
    before, _ = [chunk(pacer) for _ in range(30)][-1]
    chunk(pacer, 3.0)
    assert chunk(pacer)[0] >= 0.7 * before
    assert [chunk(pacer) for _ in range(10)][-1][0] >= 0.95 * before


@pytest.mark.parametrize("overlap", [False, True])
def test_the_clock_measures_every_step_once(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[StepWork, float, object]] = []
    learn = Pacer.learn

    def record(pacer: Pacer, *step: object, at_least: float) -> None:
        assert at_least == step[1], "on a CPU every time is exact"
        measured.append(step)
        learn(pacer, *step, at_least=at_least)

    monkeypatch.setattr(Pacer, "learn", record)
    with open_llm("llama", overlap=overlap, target_itl_ms=5.0) as llm:
        begin = time.monotonic()
        llm.generate([prompt_of(20), prompt_of(9)], greedy_params(6), use_tqdm=False)
        seconds = time.monotonic() - begin
    assert sum(work.num_prefill for work, *_ in measured) == 29
    assert sum(work.num_sampled for work, *_ in measured) == 12
    assert 0.5 * seconds < sum(each for _, each, _ in measured) < seconds


def rate_after(pacer: Pacer, seconds: float, at_least: float | None) -> float:
    """How many times higher the rate is after a full step that took so long."""
    decode(pacer)
    before, num_tokens = pacer._rate, pacer.num_prompt_tokens(num_decodes=20, num_waiting=1)
    pacer.learn(StepWork(num_tokens, 20, 21, 2000, 0), seconds, pacer.limit, at_least=at_least)
    return pacer._rate / before


def test_a_step_that_ended_unseen_does_not_lower_the_rate() -> None:
    """The host was late for its end, or for the end of the step before."""
    assert rate_after(trained(), 0.030, None) < 0.85
    assert rate_after(trained(), 0.030, 0.0) == pytest.approx(LATE_RISE, abs=0.02)
    assert rate_after(trained(), 0.030, 0.012) == 1
    assert rate_after(trained(), 0.030, 0.025) < 0.9
    assert rate_after(trained(), 0.012, 0.0) > 1.3


def test_a_decode_step_that_ended_unseen_is_not_measured() -> None:
    pacer = trained()
    pacer.learn(StepWork(0, 20, 20, 2000, 0), 0.1, pacer.limit, at_least=0.0)
    pacer.num_prompt_tokens(num_decodes=20, num_waiting=1)
    assert pacer.limit.seconds == TARGET


class Recorder(Pacer):
    def __init__(self) -> None:
        super().__init__()
        self.learned: list[tuple[float, float]] = []

    def learn(self, work: StepWork, seconds: float, limit: Limit, *, at_least: float | None = None) -> None:
        assert at_least is not None
        self.learned.append((at_least, seconds))


@pytest.mark.parametrize(
    ("beside_host", "times"),
    [(True, [(0.0, 9.0), (3.0, 10.0), (8.0, 8.0)]), (False, [(9.0, 9.0), (3.0, 3.0), (8.0, 8.0)])],
)
def test_the_clock_knows_what_the_host_has_not_seen(beside_host: bool, times: list[tuple[float, float]]) -> None:
    """Three steps are launched at 1, 3 and 5. The host asks for the first at 10, long after its end; it waits for the
    second until 13 and for the third until 21."""
    now = 0.0
    scheduler, pacer = Scheduler(CONFIG), Recorder()
    scheduler.add(Sequence("a", [7] * 5, SamplingParams(), max_num_tokens=20, arrival=0))
    clock = StepClock(scheduler, pacer, beside_host=beside_host, now=lambda: now)

    def wait(end: float) -> StepResult:
        nonlocal now
        now = max(now, end)
        return StepResult(tokens=[[5]])

    for launched in (1.0, 3.0, 5.0):
        now = launched
        plan = scheduler.schedule()
        assert plan is not None
        clock.begins(plan)
    now = 10.0
    for end in (4.0, 13.0, 21.0):
        clock.result_of(partial(wait, end))
    assert pacer.learned == times


@pytest.mark.parametrize(
    ("load", "limits"),
    [
        ({"num_clients": 256}, {"tok_per_s": 7200, "ttft_p99_ms": 2800, "itl_p99_ms": 60}),
        ({"rate": 48.0}, {"tok_per_s": 6000, "ttft_p99_ms": 150, "itl_p99_ms": 25}),
        ({"rate": 96.0}, {"tok_per_s": 7200, "ttft_p99_ms": 4150, "itl_p99_ms": 120}),
    ],
)
def test_a_server_under_load(load: dict[str, float], limits: dict[str, float]) -> None:
    """What is asked of Qwen3-8B on an H200; 4,000 ms to the first token at 96 requests/s is not reached."""
    found = simulated(bench_load(**load), Pacer())
    assert found["tok_per_s"] >= limits.pop("tok_per_s")
    assert all(found[name] <= limit for name, limit in limits.items()), found


@pytest.mark.parametrize(("slowness", "launch"), [(0.05, 0.008), (1.0, 0.001), (10.0, 0.014)])
def test_other_devices_and_hosts(slowness: float, launch: float) -> None:
    """Fast devices, whose steps take less time than their launch, and slow ones: the pacer costs little."""
    load, host = bench_load(num_clients=64, count=256), Host(launch_prompts=launch, launch_recorded=launch)
    paced = simulated(load, Pacer(), gpu=Gpu(slowness), host=host)
    unlimited = simulated(load, Pacer(1e6), gpu=Gpu(slowness), host=host)
    assert paced["tok_per_s"] > 0.93 * unlimited["tok_per_s"]
    assert paced["ttft_p99_ms"] < 1.25 * unlimited["ttft_p99_ms"]


def test_who_has_a_pacer() -> None:
    options = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "num_kv_cache_blocks": 8}

    def has_pacer(**changes: object) -> bool:
        engine = LLMEngine(model_dir("llama"), **options | changes)
        try:
            return engine.scheduler.pacer is not None
        finally:
            engine.close()

    assert not has_pacer()
    assert has_pacer(serves=True)
    assert has_pacer(target_itl_ms=50)
    assert not has_pacer(serves=True, target_itl_ms=0)
