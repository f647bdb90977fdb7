"""Several engines as one: which replica gets a request, and what happens when a replica ends, with fake engines."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from nanovllm.config import Config
from nanovllm.errors import ConfigError, EngineClosedError, EngineError, RequestError
from nanovllm.remote.messages import EngineStats, EngineView, RequestView, StepView
from nanovllm.remote.replicas import (
    Fleet,
    combined_view,
    device_environments,
    gpu_environments,
    thread_environments,
    total,
)
from tests.remote.fake_replicas import BLOCK_SIZE, STATS, FakeClient, Yard, all_of, open_stream, request, run, until

# --- with fake engines ------------------------------------------------------------------------------------------------


def test_the_same_beginning_meets_at_the_same_replica() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet(3)
        for client in yard.built:
            client.gate.set()
        for turn in range(4):
            for beginning in range(3):
                asked = request(f"{turn}-{beginning}", begins_with=beginning)
                assert await all_of(fleet.stream(asked)) == "one two"
        homes = [{name.split("-")[1] for name in client.seen} for client in yard.built]
        assert sorted(map(len, homes)) == [1, 1, 1] and set.union(*homes) == {"0", "1", "2"}
        await all_of(fleet.stream(request("salted", salt="s")))
        assert fleet.ready.max_model_len == 98
        await fleet.close()

    run(go())


def test_a_busy_replica_lets_others_help() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet()
        streams = [await open_stream(fleet, request(str(number))) for number in range(12)]
        first, second = (len(client.seen) for client in yard.built)
        assert first > second > 0
        for client in yard.built:
            client.gate.set()
        for stream in streams:
            assert await all_of(stream) == "two"
        assert set(fleet._router.loads.values()) == {0}
        await fleet.close()

    run(go())


def test_what_was_not_begun_goes_to_another_replica_and_what_was_ends_with_an_error() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet()
        begun = await open_stream(fleet, request("begun"))
        (victim,) = [client for client in yard.built if client.seen]
        (other,) = [client for client in yard.built if not client.seen]
        victim.says_first_word = False
        waiting = asyncio.ensure_future(all_of(fleet.stream(request("waiting"))))
        elsewhere = await open_stream(fleet, request("elsewhere", begins_with=1))
        await until(lambda: victim.running == {"begun", "waiting"})
        victim.end.set()
        other.gate.set()
        assert await waiting == "one two"
        with pytest.raises(EngineClosedError, match="is gone"):
            await anext(begun)
        assert await all_of(elsewhere) == "two"
        assert other.seen == ["elsewhere", "waiting"]
        await until(lambda: len(fleet.replicas) == 2)
        assert victim.closed and len(yard.built) == 3 and yard.built[2].number == victim.number
        yard.built[2].gate.set()
        assert {await all_of(fleet.stream(request(str(n), begins_with=n))) for n in range(4)} == {"one two"}
        assert yard.built[2].seen
        await fleet.close()
        assert all(client.closed for client in yard.built)

    run(go())


def test_a_request_that_ends_every_replica_does_not_reach_all_of_them() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet(4)
        for client in yard.built:
            client.says_first_word = False

        async def kill_whoever_takes_it() -> None:
            while True:
                for client in yard.built:
                    if client.running:
                        client.end.set()
                await asyncio.sleep(0)

        killer = asyncio.ensure_future(kill_whoever_takes_it())
        with pytest.raises(EngineClosedError):
            await all_of(fleet.stream(request("poison")))
        killer.cancel()
        assert sum("poison" in client.seen for client in yard.built) == 2
        await fleet.close()

    run(go())


def test_with_none_left_requests_are_refused_until_one_is_back() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet()
        fleet.check_health()
        yard.broken = True
        for client in yard.built:
            client.end.set()
        await until(lambda: yard.num_failures > 2)
        for broken in (
            lambda: all_of(fleet.stream(request("a"))),
            lambda: fleet.embed([1], "last"),
            fleet.stats,
            fleet.reset_prefix_cache,
            lambda: anext(fleet.view()),
        ):
            with pytest.raises(EngineClosedError, match="no replica is running"):
                await broken()
        with pytest.raises(EngineClosedError):
            fleet.check_health()
        yard.broken = False
        await until(lambda: len(fleet.replicas) == 2)
        fleet.check_health()
        await fleet.close()

    run(go())


def test_a_replica_that_is_stalled_is_given_up_while_another_is_well() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet()
        first, second = yard.built
        first.says_first_word = second.says_first_word = False
        waiting = asyncio.ensure_future(all_of(fleet.stream(request("a"))))
        await until(lambda: bool(first.running))
        first.ill = second.ill = True
        with pytest.raises(EngineError, match="stalled"):
            fleet.check_health()
        assert len(fleet.replicas) == 2
        second.ill = False
        second.gate.set()
        fleet.check_health()
        assert await waiting == "two" and first.closed
        await until(lambda: len(fleet.replicas) == 2)
        await fleet.close()

    run(go())


def test_waits_between_starts_grow() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet(1)
        yard.broken = True
        yard.built[0].end.set()
        await asyncio.sleep(0.5)  # 0.01 + 0.02 + 0.04 + 0.08 + 0.16 = 0.31; the sixth would come after 0.63
        assert 2 <= yard.num_failures <= 5
        await fleet.close()

    run(go())


def test_leaving_early_and_aborting_reach_the_replica() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet()
        stream = await open_stream(fleet, request("a"))
        with pytest.raises(RequestError, match="'a'"):
            await anext(fleet.stream(request("a", begins_with=1)))
        (home,) = [client for client in yard.built if client.seen]
        fleet.abort(["a", "unknown"])
        assert home.aborted == ["a"]
        await stream.aclose()
        assert not home.running and set(fleet._router.loads.values()) == {0}
        reader = asyncio.ensure_future(all_of(fleet.stream(request("b"))))
        await until(lambda: bool(home.running))
        reader.cancel()
        await until(lambda: not home.running and set(fleet._router.loads.values()) == {0})
        await fleet.close()

    run(go())


def test_embeddings_are_spread_and_tried_again() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet()
        first, second = (asyncio.ensure_future(fleet.embed([1, 2], "last")) for _ in range(2))
        await asyncio.sleep(0)
        assert sorted(fleet._router.loads.values()) == [1, 1]
        yard.built[0].end.set()
        yard.built[1].gate.set()
        assert await asyncio.gather(first, second) == [[1.0], [1.0]]
        await fleet.close()

    run(go())


def test_stats_are_sums_that_never_fall() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet()
        assert await fleet.stats() == total([STATS, STATS]) == EngineStats(2, 4, 20, 6, 10, 14, 200, 80, 2000, 1000)
        await fleet.reset_prefix_cache()
        assert [client.num_resets for client in yard.built] == [1, 1]
        yard.broken = True
        yard.built[0].end.set()
        await until(lambda: len(fleet.replicas) == 1)
        assert await fleet.stats() == EngineStats(1, 2, 10, 3, 5, 14, 200, 80, 2000, 1000)
        await fleet.close()

    run(go())


def view_of(name: str, owner: int) -> EngineView:
    running = [RequestView(name, 3, 2, 5, owner)]
    return EngineView(STATS, bytes([0, 2]), [0, owner], running, [], [StepView(0.5, 3, owner, 2.0)])


def test_the_view_shows_all_replicas() -> None:
    both = combined_view([view_of("a", 1), view_of("b", 1)], [], owners_each=10)
    assert both.blocks == bytes([0, 2, 0, 2]) and both.owners == [0, 1, 0, 11]
    assert [(one.request_id, one.owner) for one in both.running] == [("a", 1), ("b", 11)]
    assert both.stats == total([STATS, STATS])


def test_who_looks_sees_replicas_come_and_go() -> None:
    async def go() -> None:
        yard = Yard()
        fleet = await yard.fleet()
        async with aclosing(fleet.view()) as views:
            yard.built[1].views.put_nowait(view_of("b", 1))
            assert [one.request_id for one in (await anext(views)).running] == ["b"]
            yard.built[0].views.put_nowait(view_of("a", 2))
            seen = await anext(views)
            assert [one.request_id for one in seen.running] == ["a", "b"] and len(seen.steps) == 1
            yard.built[0].end.set()
            assert [one.request_id for one in (await anext(views)).running] == ["b"]
            await until(lambda: len(yard.built) == 3 and len(fleet.replicas) == 2)
            yard.built[2].views.put_nowait(view_of("c", 2))
            assert [one.request_id for one in (await anext(views)).running] == ["c", "b"]
            closing = asyncio.ensure_future(fleet.close())
            with pytest.raises(EngineClosedError):
                await anext(views)
            await closing

    run(go())


def test_if_one_cannot_be_started_none_is_left() -> None:
    built: list[FakeClient] = []

    async def launch(number: int) -> FakeClient:
        if number == 2:
            await asyncio.sleep(0.01)
            raise EngineError("no room")
        if number == 1:
            await asyncio.sleep(60)
        built.append(FakeClient(number))
        return built[-1]

    async def go() -> None:
        with pytest.raises(EngineError, match="no room"):
            await Fleet.start(launch, 3, block_size=BLOCK_SIZE, max_num_seqs=4)
        assert len(built) == 1 and built[0].closed

    run(go())


# --- devices ----------------------------------------------------------------------------------------------------------


def test_gpus_are_shared_out() -> None:
    assert gpu_environments(["4", "5", "6", "7"], 2, 2) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    with pytest.raises(ConfigError, match="replicas=2: 4 GPUs are needed, 2 for each replica, and there are 3"):
        gpu_environments(["0", "1", "2"], 2, 2)


def test_threads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_environments(8, 2) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert thread_environments(2, 3) == [{"OMP_NUM_THREADS": "1"}] * 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_environments(8, 2) == [{"OMP_NUM_THREADS": "3"}] * 2


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_no_such_number_of_replicas(count: Any) -> None:
    with pytest.raises(ConfigError, match="replicas="):
        device_environments(Config(device="cpu"), count)
