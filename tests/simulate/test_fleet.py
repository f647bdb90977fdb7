"""The simulation against times computed by hand and against the roofline, and properties for any load."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.bench.roofline import Roofline
from nanovllm.bench.shapes import shape_folder
from nanovllm.config import SchedulerConfig
from nanovllm.engine.consistency import check_scheduler
from nanovllm.models.registry import describe
from nanovllm.remote.routing import RoundRobin
from nanovllm.simulate import POLICIES
from nanovllm.simulate.fleet import Fleet, Outcome
from nanovllm.simulate.metrics import duration, latencies, measure
from nanovllm.simulate.requests import Arrival, Synthetic, trace_arrivals
from nanovllm.simulate.runs import Limits, Settings, fewest_replicas, make_policy, pooled, simulate
from nanovllm.simulate.step_time import H200, H200_OVERHEAD, Linear, Modelled
from nanovllm.state import BlockGroup

EXCERPT = Path(__file__).parent.parent / "data" / "traces" / "mooncake_excerpt.jsonl"
CONFIG = SchedulerConfig(
    max_num_batched_tokens=64,
    max_num_seqs=8,
    max_model_len=1000,
    block_size=4,
    groups=(BlockGroup(40),),
    enable_prefix_caching=True,
)
LINEAR = Linear(step=1.0, prefill_token=0.1, decode=0.5, context_token=0.01)
QWEN3_8B = describe(shape_folder("qwen3-8b")).config
ROOFLINE = Roofline(H200, QWEN3_8B, 2, "bfloat16")


def alone(arrivals: list[Arrival], config: SchedulerConfig = CONFIG) -> Outcome:
    return simulate(arrivals, num_replicas=1, policy="prefix", settings=Settings(config, LINEAR, 8, 1.5))


def own(index: int, *, seconds: float = 0.0, input_len: int = 4, output_len: int = 3) -> Arrival:
    return Arrival(seconds, ((-1 - index, input_len),), output_len)


# --- exact times ------------------------------------------------------------------------------------------------------


def test_two_requests_by_hand() -> None:
    outcome = alone([own(0), own(1, seconds=1.2, input_len=2, output_len=2)])
    first = 1 + 4 * 0.1  # the prompt of the first; the second arrives while it is computed
    second = first + 1 + 2 * 0.1 + 0.5 + 5 * 0.01  # the first decodes with 5 tokens, the second's prompt is computed
    third = second + 1 + 2 * 0.5 + (6 + 3) * 0.01
    assert outcome.first_token == pytest.approx([first, second])
    assert outcome.ended == pytest.approx([third, third])
    assert outcome.busy_seconds == pytest.approx([third])
    assert outcome.num_steps == [3]
    row = measure(outcome)
    assert row["requests_per_s"] == pytest.approx(2 / third)
    assert row["ttft_mean_ms"] == pytest.approx(1e3 * (first + second - 1.2) / 2)
    assert latencies(outcome)["tpot"] == pytest.approx([(third - first) / 2, third - second])
    assert row["e2e_p50_ms"] == pytest.approx(1e3 * (third + third - 1.2) / 2)


def test_a_replica_rests_between_requests() -> None:
    outcome = alone([own(0, output_len=1), own(1, seconds=10.0, output_len=1)])
    assert outcome.ended == pytest.approx([1.4, 11.4])
    assert measure(outcome)["busy_percent"] == pytest.approx(100 * 2.8 / 11.4)
    assert latencies(outcome)["tpot"] == []


def test_arrivals_of_one_moment_share_a_step() -> None:
    assert alone([own(0, output_len=1), own(1, output_len=1)]).ended == pytest.approx([1.8, 1.8])


def test_a_cached_prefix_takes_no_time() -> None:
    same = ((7, 8), (-1, 1)), ((7, 8), (-2, 1))
    outcome = alone([Arrival(0.0, same[0], 1), Arrival(5.0, same[1], 1)])
    assert outcome.num_cached == [0, 8]
    assert outcome.ended == pytest.approx([1.9, 6.1])
    assert measure(outcome)["cache_hit_percent"] == pytest.approx(100 * 8 / 18)


def test_an_impossible_request_is_refused_and_counted() -> None:
    outcome = alone([own(0, input_len=500), own(1, output_len=1)])
    assert math.isnan(outcome.ended[0])
    row = measure(outcome)
    assert (row["requests"], row["refused"]) == (1, 1)
    assert not Limits().are_kept_by(row)


def test_a_whole_batch_takes_what_the_roofline_says() -> None:
    """All prompts in one step, then all decode together: the roofline's sum for that is an independent reference."""
    arrivals = [own(index, input_len=100 + 7 * index, output_len=20 + 3 * index) for index in range(30)]
    config = replace(CONFIG, max_num_batched_tokens=10**6, max_num_seqs=64, groups=(BlockGroup(10**4),))
    fleet = Fleet(num_replicas=1, config=config, step_time=Modelled(ROOFLINE, 0.0), policy=RoundRobin([0]))
    seconds = duration(fleet.run(arrivals))
    input_lens, output_lens = zip(*((arrival.input_len, arrival.output_len) for arrival in arrivals), strict=True)
    assert seconds == pytest.approx(ROOFLINE.workload_seconds(input_lens, output_lens))


def test_throughput_is_that_of_the_step() -> None:
    """Many more requests than rows: the batch is full in every step but the last few."""
    linear = Linear(step=1.0, prefill_token=0.0, decode=0.5)
    config = replace(CONFIG, groups=(BlockGroup(400),))
    arrivals = [own(index, output_len=50) for index in range(400)]
    fleet = Fleet(num_replicas=1, config=config, step_time=linear, policy=RoundRobin([0]))
    row = measure(fleet.run(arrivals))
    assert row["output_tokens_per_s"] == pytest.approx(8 / (1 + 0.5 * 8), rel=0.02)


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def loads(draw: st.DrawFn) -> list[Arrival]:
    times = sorted(draw(st.lists(st.floats(0, 20), min_size=1, max_size=25)))
    pieces = st.tuples(st.integers(1, 3), st.integers(1, 30)), st.tuples(st.integers(-3, -1), st.integers(1, 20))
    return [Arrival(seconds, draw(st.tuples(*pieces)), draw(st.integers(1, 20))) for seconds in times]


@settings(max_examples=60, deadline=None)
@given(arrivals=loads(), policy=st.sampled_from(POLICIES[:3]), num_replicas=st.integers(1, 4), caches=st.booleans())
def test_all_ends_and_everything_is_given_back(
    arrivals: list[Arrival], policy: str, num_replicas: int, caches: bool
) -> None:
    config = replace(CONFIG, groups=(BlockGroup(18),), enable_prefix_caching=caches)  # few: some are preempted
    run = Settings(config, LINEAR, 2, 1.5)
    fleet = Fleet(
        num_replicas=num_replicas, config=config, step_time=LINEAR, policy=make_policy(policy, num_replicas, run)
    )
    outcome = fleet.run(arrivals)
    for arrival, first, ended in zip(arrivals, outcome.first_token, outcome.ended, strict=True):
        assert arrival.seconds + LINEAR.step <= first <= ended
        assert ended - first >= (arrival.output_len - 1) * LINEAR.step * 0.999
    for replica in fleet.replicas:
        check_scheduler(replica.scheduler)
        assert replica.scheduler.num_unfinished == 0
        assert replica.scheduler.block_manager.num_available == config.num_blocks
    assert set(fleet.policy.loads.values()) == {0}
    assert max(outcome.busy_seconds) <= duration(outcome) * 1.000001
    assert outcome == simulate(arrivals, num_replicas=num_replicas, policy=policy, settings=run)


def test_preemptions_are_counted_and_the_first_token_counts_once() -> None:
    config = replace(CONFIG, groups=(BlockGroup(12),))
    outcome = alone([own(index, input_len=10, output_len=20) for index in range(3)], config)
    assert outcome.num_preemptions[0] > 0
    assert outcome.first_token == pytest.approx([1 + 30 * 0.1] * 3)


# --- routing ----------------------------------------------------------------------------------------------------------


def hit_rates(arrivals: list[Arrival], *, num_replicas: int, config: SchedulerConfig) -> dict[str, float]:
    run = Settings(config, Modelled(ROOFLINE, H200_OVERHEAD), 8, 1.5)
    return {
        policy: measure(simulate(arrivals, num_replicas=num_replicas, policy=policy, settings=run))["cache_hit_percent"]
        for policy in POLICIES
    }


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_prefix_routing_reaches_the_big_replica_on_drawn_requests(skew: float) -> None:
    arrivals = Synthetic(groups=40, prefix=(512, 512), output=(8, 24), skew=skew).arrivals(count=800, rate=80, seed=0)
    config = replace(CONFIG, max_num_batched_tokens=8192, max_num_seqs=64, groups=(BlockGroup(600),), block_size=32)
    rates = hit_rates(arrivals, num_replicas=8, config=config)
    assert rates["prefix"] > rates["one-big"] - 5
    assert rates["prefix"] > rates["round-robin"] + 10
    assert rates["prefix"] > rates["least-loaded"] + 10


def test_prefix_routing_reaches_the_big_replica_on_a_trace() -> None:
    arrivals = [replace(arrival, output_len=min(arrival.output_len, 12)) for arrival in trace_arrivals(EXCERPT, rate=8)]
    config = replace(
        CONFIG,
        max_num_batched_tokens=16384,
        max_num_seqs=512,
        max_model_len=200_000,
        groups=(BlockGroup(24995),),
        block_size=32,
    )
    rates = hit_rates(arrivals, num_replicas=8, config=config)
    assert rates["one-big"] > 28
    assert rates["prefix"] > rates["one-big"] - 5
    assert rates["prefix"] > rates["round-robin"] + 10


def test_the_big_replica_has_everything_of_all() -> None:
    big = pooled(CONFIG, 3)
    assert (big.num_blocks, big.max_num_seqs, big.max_num_batched_tokens) == (120, 24, 192)
    run = Settings(CONFIG, LINEAR, 8, 1.5)
    arrivals = [own(index, output_len=1) for index in range(3)]
    outcome = simulate(arrivals, num_replicas=3, policy="one-big", settings=run)
    assert outcome.ended == pytest.approx([1.4] * 3)  # each device computes one prompt


# --- number of replicas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enough", range(1, 21))
def test_the_fewest_replicas_are_found(enough: int) -> None:
    tried = []

    def run(number: int) -> dict[str, float | int]:
        tried.append(number)
        return {"ttft_p99_ms": 1000 / number, "tpot_p99_ms": 1.0, "refused": 0}

    limits = Limits(ttft_p99_ms=1000 / enough)
    found, rows = fewest_replicas(run, limits=limits, most=20)
    assert found == enough
    assert list(rows) == sorted(tried)
    assert len(set(tried)) == len(tried) <= 10
    assert fewest_replicas(run, limits=Limits(ttft_p99_ms=1000 / 21), most=20)[0] is None
    assert fewest_replicas(run, limits=Limits(tpot_p99_ms=0.5), most=1)[0] is None
