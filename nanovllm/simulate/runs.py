"""Runs simulations: one policy on a number of replicas, or a search for the smallest number that is enough."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nanovllm.bench.report import Row
from nanovllm.config import SchedulerConfig
from nanovllm.remote.routing import LeastLoaded, Policy, RoundRobin, Router
from nanovllm.simulate import POOLED
from nanovllm.simulate.fleet import Fleet, Outcome
from nanovllm.simulate.metrics import measure
from nanovllm.simulate.requests import Arrival
from nanovllm.simulate.step_time import Divided, StepTime


@dataclass(frozen=True)
class Settings:
    """What all runs have in common; `max_lead` and `max_ratio` are the router's."""

    config: SchedulerConfig  # of one replica
    step_time: StepTime
    max_lead: int
    max_ratio: float
    target_itl_ms: float | None = None  # the engine's option


@dataclass(frozen=True)
class Limits:
    """Limits of the p99 latencies in milliseconds; None means no limit."""

    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None

    def are_kept_by(self, row: Row) -> bool:
        """Whether a run meets the limits. One refused request misses them; a latency that no request has meets them."""
        pairs = ((self.ttft_p99_ms, row["ttft_p99_ms"]), (self.tpot_p99_ms, row["tpot_p99_ms"]))
        return not row["refused"] and all(limit is None or (found or 0.0) <= limit for limit, found in pairs)


def simulate(arrivals: Sequence[Arrival], *, num_replicas: int, policy: str, settings: Settings) -> Outcome:
    """Simulate the requests on `num_replicas` replicas with the named policy."""
    if policy == POOLED:
        config, step_time = pooled(settings.config, num_replicas), Divided(settings.step_time, num_replicas)
        fleet = Fleet(
            num_replicas=1,
            config=config,
            step_time=step_time,
            policy=RoundRobin(range(1)),
            target_itl_ms=settings.target_itl_ms,
        )
    else:
        fleet = Fleet(
            num_replicas=num_replicas,
            config=settings.config,
            step_time=settings.step_time,
            policy=make_policy(policy, num_replicas, settings),
            target_itl_ms=settings.target_itl_ms,
        )
    return fleet.run(arrivals)


def make_policy(name: str, num_replicas: int, settings: Settings) -> Policy:
    replicas = range(num_replicas)
    if name == "round-robin":
        return RoundRobin(replicas)
    if name == "least-loaded":
        return LeastLoaded(replicas)
    return Router(
        replicas,
        block_size=settings.config.block_size,
        blocks_per_replica=settings.config.num_blocks,
        max_lead=settings.max_lead,
        max_ratio=settings.max_ratio,
    )


def pooled(config: SchedulerConfig, num_replicas: int) -> SchedulerConfig:
    """The config of one replica with the cache, the sequences and the token budget of all."""
    return replace(
        config,
        groups=tuple(replace(group, num_blocks=group.num_blocks * num_replicas) for group in config.groups),
        max_num_seqs=config.max_num_seqs * num_replicas,
        max_num_batched_tokens=config.max_num_batched_tokens * num_replicas,
    )


def fewest_replicas(run: Callable[[int], Row], *, limits: Limits, most: int) -> tuple[int | None, dict[int, Row]]:
    """The smallest number from 1 to `most` that meets the limits (None if none does), and the rows of all runs.

    Doubles the number until the limits are met, then bisects. Assumes that more replicas are never slower.
    """
    tried: dict[int, Row] = {}
    missed, number = 0, 1
    while True:
        tried[number] = run(number)
        if limits.are_kept_by(tried[number]):
            break
        missed = number
        if number == most:
            return None, tried
        number = min(2 * number, most)
    enough = number
    while enough - missed > 1:
        middle = (enough + missed) // 2
        tried[middle] = run(middle)
        if limits.are_kept_by(tried[middle]):
            enough = middle
        else:
            missed = middle
    return enough, dict(sorted(tried.items()))


def run_row(arrivals: Sequence[Arrival], *, num_replicas: int, policy: str, settings: Settings) -> Row:
    outcome = simulate(arrivals, num_replicas=num_replicas, policy=policy, settings=settings)
    return {"policy": policy, "replicas": num_replicas, **measure(outcome)}
