"""Steps with prompts last about as long as the target while sequences decode, whatever the device and the load."""

import random
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import SchedulerConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.pacer import FIRST_TOKENS, MAX_STRETCH, MIN_TARGET, MIN_TOKENS, SHARE, Pacer
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_work import StepWork, WorkCounter
from nanovllm.plan import StepResult
from nanovllm.sampling_params import SamplingParams
from nanovllm.state import BlockGroup
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
    allowed: float  # by the rule, from what was known before the step


def run(device: Device, pacer: Pacer, arrivals: list[tuple[float, int, int]], seed: int = 0) -> list[Step]:
    """All steps of a load; an arrival is (time, prompt tokens, output tokens)."""
    rng, counter, now = random.Random(seed), WorkCounter(), 0.0
    scheduler = Scheduler(CONFIG, pacer=pacer)
    waiting = [
        (time, Sequence(str(number), [7] * prompt, SamplingParams(), max_num_tokens=prompt + output, arrival=number))
        for number, (time, prompt, output) in enumerate(sorted(arrivals))
    ]
    steps: list[Step] = []
    while waiting or scheduler.num_unfinished:
        if not scheduler.num_unfinished:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            scheduler.add(waiting.pop(0)[1])
        num_waiting, num_decodes = len(scheduler.waiting) + len(scheduler.prefilling), len(scheduler.decoding)
        allowed = pacer.target * min(max(SHARE * num_waiting / max(num_decodes, 1), 1.0), MAX_STRETCH)
        plan = scheduler.schedule()
        assert plan is not None
        work = counter.count(plan, scheduler)
        seconds = device.seconds(work, rng)
        now += seconds
        steps.append(Step(work, seconds, allowed))
        num_sampled = len(plan.decode_rows) + sum(row.num_sampled for row in plan.row_steps)
        scheduler.update(plan, StepResult(tokens=[[5]] * num_sampled))
        pacer.learn(work, seconds, pacer.limit)
    scheduler.check()
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
    num_mixed = 0
    for step in steps:
        if step.work.num_prefill and step.work.num_decodes:
            num_mixed += 1
            if num_mixed > LEARNING and step.work.num_prefill > MIN_TOKENS:
                of_decodes = device.seconds(step.work._replace(num_prefill=0, num_scores=0), random.Random(0))
                assert step.seconds < 1.4 * step.allowed + of_decodes
        elif step.work.num_prefill:
            assert step.work.num_prefill <= CONFIG.max_num_batched_tokens


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


def decodes(pacer: Pacer, seconds: list[float]) -> None:
    for each in seconds:
        pacer.learn(StepWork(0, 4, 4, 1000, 0), each, pacer.limit)


def chunk(pacer: Pacer, seconds: float | None = None) -> tuple[int, float]:
    """A full step: prompt tokens and seconds; 15 ms for 20 decodes and 20 us for each prompt token, or `seconds`."""
    num_tokens = pacer.num_prompt_tokens(num_decodes=20, num_waiting=1)
    seconds = seconds or 0.015 + 20e-6 * num_tokens
    pacer.learn(StepWork(num_tokens, 20, 21, 2000, num_tokens**2 / 2), seconds, pacer.limit)
    return num_tokens, seconds


def test_the_first_steps_and_the_least_tokens() -> None:
    pacer = Pacer(1e-6)
    assert [chunk(pacer)[0] for _ in range(3)] == [FIRST_TOKENS, MIN_TOKENS, MIN_TOKENS]


def test_the_target_follows_the_quickest_steps() -> None:
    quick, slow = Pacer(), Pacer()
    decodes(quick, [1e-3] * 20)
    assert quick.target == MIN_TARGET
    decodes(slow, [0.02] * 20 + [0.5] * 20)
    assert slow.target == pytest.approx(0.1)


@pytest.mark.parametrize("target", [0.02, 0.025, 0.1])
def test_steps_take_as_long_as_they_may(target: float) -> None:
    pacer = Pacer(target)
    found = [chunk(pacer)[1] for _ in range(30)]
    assert found[-1] == pytest.approx(target, rel=0.1)


def test_small_chunks_say_nothing() -> None:
    pacer = Pacer(0.025)
    before = [chunk(pacer) for _ in range(30)][-1]
    for _ in range(50):  # the ends of prompts, in steps whose time is that of the decodes
        pacer.num_prompt_tokens(num_decodes=20, num_waiting=1)
        pacer.learn(StepWork(10, 20, 21, 2000, 55), 0.0152, pacer.limit)
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
    monkeypatch.setattr(Pacer, "learn", lambda pacer, *step: (measured.append(step), learn(pacer, *step)))
    with open_llm("llama", overlap=overlap, target_itl_ms=5.0) as llm:
        begin = time.monotonic()
        llm.generate([prompt_of(20), prompt_of(9)], greedy_params(6), use_tqdm=False)
        seconds = time.monotonic() - begin
    assert sum(work.num_prefill for work, *_ in measured) == 29
    assert sum(work.num_sampled for work, *_ in measured) == 12
    assert 0.5 * seconds < sum(each for _, each, _ in measured) < seconds


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
