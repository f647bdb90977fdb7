"""The router against a brute-force reference, and properties for any sequence of requests."""

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.remote.routing import LeastLoaded, Policy, RoundRobin, Router

SIZE = 4
Make = Callable[..., Policy]
POLICIES: list[Make] = [Router, RoundRobin, LeastLoaded]
prompts = st.lists(st.integers(0, 2), max_size=5 * SIZE)


def prompt_of(*blocks: int) -> list[int]:
    return [block for block in blocks for _ in range(SIZE)]


def common_blocks(left: list[int], right: list[int]) -> int:
    count = 0
    while (count + 1) * SIZE <= min(len(left), len(right)):
        if left[: (count + 1) * SIZE] != right[: (count + 1) * SIZE]:
            break
        count += 1
    return count


# --- every policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", POLICIES)
@given(
    actions=st.lists(st.one_of(prompts, st.integers(0, 5), st.just("add"), st.just("remove")), max_size=60),
    choices=st.randoms(use_true_random=False),
)
def test_never_a_removed_replica_and_counts_return_to_zero(
    make: Make, actions: list[list[int] | int | str], choices: random.Random
) -> None:
    policy = make(["a", "b"])
    here, running = {"a", "b"}, []
    for number, action in enumerate(actions):
        if action == "add":
            policy.add(f"new {number}")
            here.add(f"new {number}")
        elif action == "remove" and len(here) > 1:
            gone = choices.choice(sorted(here))
            policy.remove(gone)
            here.discard(gone)
        elif isinstance(action, list):
            weight = choices.randint(1, 3)
            replica = policy.route(action, salt=choices.choice([None, "x"]), weight=weight)
            assert replica in here
            running.append((replica, weight))
        elif running:
            replica, weight = running.pop(choices.randrange(len(running)))
            policy.finished(replica, weight=weight)
        assert policy.loads == {
            name: sum(weight for replica, weight in running if replica == name) for name in policy.loads
        }
    assert policy.loads.keys() == here
    for replica, weight in running:
        policy.finished(replica, weight=weight)
    assert set(policy.loads.values()) == {0}


@pytest.mark.parametrize("make", POLICIES)
def test_without_replicas(make: Make) -> None:
    policy = make()
    with pytest.raises(LookupError, match="no replica"):
        policy.route([1, 2, 3])
    policy.add("a")
    with pytest.raises(ValueError, match="'a' is already here"):
        policy.add("a")
    assert policy.route([1, 2, 3]) == "a"
    policy.remove("a")
    policy.remove("a")
    policy.finished("a")
    with pytest.raises(LookupError, match="no replica"):
        policy.route([1, 2, 3])


def test_a_replica_that_comes_back_never_counts_below_zero() -> None:
    router = Router(["a"])
    router.route([])
    router.remove("a")
    router.add("a")
    router.finished("a")  # a request from before the removal
    assert router.loads == {"a": 0}


def test_round_robin_and_least_loaded() -> None:
    policy: Policy = RoundRobin("abc")
    assert [policy.route([]) for _ in range(5)] == list("abcab")
    policy.remove("a")
    assert [policy.route([]) for _ in range(3)] == list("bcb")
    policy = LeastLoaded("abc")
    assert [policy.route([], weight=weight) for weight in (3, 1, 2, 1)] == list("abcb")
    policy.finished("a", weight=3)
    assert policy.route([]) == "a"


# --- prefixes ---------------------------------------------------------------------------------------------------------


@given(sent=st.lists(prompts, max_size=30), num_replicas=st.integers(1, 4))
def test_the_longest_beginning_wins_if_load_does_not_matter(sent: list[list[int]], num_replicas: int) -> None:
    router = Router(range(num_replicas), block_size=SIZE, max_lead=1000)
    held: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    for prompt in sent:
        matches = [max((common_blocks(prompt, old) for old in olds), default=0) for olds in held]
        replica = router.route(prompt)
        assert isinstance(replica, int)
        assert matches[replica] == max(matches)
        held[replica].append(prompt)


def test_same_prefix_sticks_and_salts_are_apart() -> None:
    router = Router(range(4), block_size=SIZE, max_lead=8)
    first = router.route(prompt_of(1, 2, 3))
    assert {router.route(prompt_of(1, 2, number)) for number in range(4, 8)} == {first}
    assert router.route(prompt_of(1, 2, 3), salt="other") != first
    assert router.route(prompt_of(1, 2, 3)) == first


@given(max_lead=st.integers(0, 20), num_replicas=st.integers(2, 6))
def test_a_busy_holder_spills(max_lead: int, num_replicas: int) -> None:
    """A replica's lead is within the limit before it gets another request."""
    router = Router(range(num_replicas), block_size=SIZE, max_lead=max_lead, max_ratio=1.0)
    for number in range(1, 200):
        before = router.loads
        replica = router.route(prompt_of(1, 2, 3))
        assert before[replica] - min(before.values()) <= max_lead
        if number <= max_lead + 1:
            assert replica == 0
    assert min(router.loads.values()) > 0


def test_under_heavy_load_the_ratio_counts() -> None:
    router = Router(["a", "b"], block_size=SIZE, max_lead=1, max_ratio=1.5)
    assert router.route(prompt_of(1), weight=60) == "a"
    assert router.route(prompt_of(2), weight=90) == "b"
    assert router.route(prompt_of(2)) == "b"  # 90 = 1.5 x 60
    assert router.route(prompt_of(2)) == "a"


def test_a_spilled_request_goes_where_less_of_it_is_held() -> None:
    router = Router(["a", "b", "c"], block_size=SIZE, max_lead=4, max_ratio=1.0)
    assert router.route(prompt_of(1, 2, 3, 4), weight=6) == "a"
    assert router.route(prompt_of(1, 2), weight=2) == "b"  # "a" leads by 6, more than the allowed 4
    assert router.route(prompt_of(1, 2, 3, 4)) == "b"  # "b" leads by 2, which half of the prompt allows


def test_a_beginning_that_all_share_draws_nothing_together() -> None:
    router = Router(range(8), block_size=SIZE, max_lead=8)
    for number in range(1, 801):
        router.route(prompt_of(0, *[number] * 15))
    assert max(router.loads.values()) - min(router.loads.values()) <= 1


def test_between_equals_the_emptier_one_wins() -> None:
    router = Router("abc", block_size=SIZE)
    for replica, blocks in (("a", (1, 1)), ("b", (2,)), ("c", (3, 3, 3))):
        assert router.route(prompt_of(*blocks)) == replica
    for replica in "abc":
        router.finished(replica)
    assert router.route(prompt_of(9)) == "b"


# --- memory and time --------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(sent=st.lists(st.tuples(prompts, st.booleans()), max_size=60), most=st.integers(1, 6))
def test_memory_is_bounded_and_the_index_follows(sent: list[tuple[list[int], bool]], most: int) -> None:
    router = Router(range(3), block_size=SIZE, blocks_per_replica=most, max_lead=1)
    for prompt, finishes in sent:
        replica = router.route(prompt)
        if finishes:
            router.finished(replica)
        known = [router.num_known_blocks(index) for index in range(3)]
        assert max(known) <= most
        assert sum(holders.bit_count() for holders in router._holders.values()) == sum(known)
    for replica in range(3):
        router.remove(replica)
    assert not router._holders


def test_what_was_used_last_is_remembered() -> None:
    router = Router(["a", "b"], block_size=SIZE, blocks_per_replica=2, max_lead=100)
    sent = [((1,), 1), ((7,), 10), ((2,), 1), ((1,), 1), ((3,), 1)]
    assert [router.route(prompt_of(*blocks), weight=weight) for blocks, weight in sent] == list("abaaa")
    router.finished("b", weight=10)
    assert router.route(prompt_of(2)) == "b"  # evicted by 3, so it goes to the least loaded
    assert router.route(prompt_of(1)) == "a"


def test_a_prompt_longer_than_the_memory_keeps_its_beginning() -> None:
    router = Router(["a", "b"], block_size=SIZE, blocks_per_replica=3, max_lead=10)
    router.route(prompt_of(1, 2, 3, 4, 5, 6))
    assert router.route(prompt_of(1, 2, 9)) == "a"


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"blocks_per_replica": 0}, {"max_lead": -1}, {"max_ratio": 0.5}])
def test_wrong_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Router(["a"], **wrong)  # type: ignore[arg-type]


def test_many_replicas_and_requests_take_seconds() -> None:
    router = Router(range(64))
    prefixes = [[number] * 512 for number in range(100)]
    begin = time.process_time()
    for number in range(5000):
        replica = router.route(prefixes[number % 100] + [number] * 100)
        if number % 3:
            router.finished(replica)
    assert time.process_time() - begin < 5  # takes 0.2 s
