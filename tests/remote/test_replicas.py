"""Several engines as one: which replica gets a request, and what happens when a replica ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from nanovllm.config import Config
from nanovllm.engine.deltas import Delta
from nanovllm.errors import ConfigError, EngineClosedError, EngineError, ModelNotFoundError, RequestError
from nanovllm.remote.messages import AddRequest, EngineStats, EngineView, Ready, RequestView, StepView
from nanovllm.remote.replicas import (
    Fleet,
    Replicas,
    combined_view,
    device_environments,
    gpu_environments,
    thread_environments,
    total,
)
from nanovllm.sampling_params import SamplingParams
from tests.helpers import TEXT_MODEL, greedy_params, model_dir, open_llm

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 16
STATS = EngineStats(1, 2, 10, 3, 5, 7, 100, 40, 1000, 500)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_block_size": BLOCK_SIZE,
    "num_kv_cache_blocks": 64,
}
ENDLESS = greedy_params(200)
PATIENCE = 30.0  # seconds allowed for operations that take milliseconds


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.005)


# --- with fake engines ------------------------------------------------------------------------------------------------


class FakeClient:
    """Sends two words per request, the second when the test allows it; ends when the test wants it."""

    pid = None

    def __init__(self, number: int, max_model_len: int = 100) -> None:
        self.number = number
        self.ready = Ready(max_model_len, 10, BLOCK_SIZE, {})
        self.seen: list[str] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.says_first_word = True
        self.end = asyncio.Event()
        self.ill = False
        self.closed = False
        self.views: asyncio.Queue[EngineView] = asyncio.Queue()
        self.num_resets = 0

    async def _wait(self, event: asyncio.Event) -> None:
        tasks = [asyncio.ensure_future(one.wait()) for one in (event, self.end)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.end.is_set():
            raise EngineClosedError(f"engine {self.number} is gone")

    async def stream(self, request: AddRequest) -> AsyncGenerator[list[Delta], None]:
        name = request.request_id
        self._check_alive()
        self.seen.append(name)
        self.running.add(name)
        try:
            if self.says_first_word:
                yield [Delta(name, 0, "one", [1])]
            await self._wait(self.gate)
            yield [Delta(name, 0, "two", [2], finish_reason="stop")]
        finally:
            self.running.discard(name)

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        await self._wait(self.gate)
        return [float(self.number)]

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def check_health(self) -> None:
        self._check_alive()
        if self.ill:
            raise EngineError("stalled")

    async def stats(self) -> EngineStats:
        self._check_alive()
        return STATS

    async def reset_prefix_cache(self) -> None:
        self._check_alive()
        self.num_resets += 1

    async def view(self) -> AsyncGenerator[EngineView, None]:
        while True:
            view = asyncio.ensure_future(self.views.get())
            end = asyncio.ensure_future(self.end.wait())
            try:
                await asyncio.wait({view, end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                end.cancel()
            self._check_alive()
            yield view.result()

    async def ended(self) -> None:
        await self.end.wait()

    async def close(self) -> None:
        self.closed = True
        self.end.set()


class Yard:
    """Starts fake engines and keeps a list of all of them."""

    def __init__(self) -> None:
        self.built: list[FakeClient] = []
        self.broken = False
        self.num_failures = 0

    async def launch(self, number: int) -> FakeClient:
        await asyncio.sleep(0)
        if self.broken:
            self.num_failures += 1
            raise EngineError("out of order")
        self.built.append(FakeClient(number, max_model_len=100 - number))
        return self.built[-1]

    async def fleet(self, count: int = 2) -> Fleet:
        return await Fleet.start(self.launch, count, block_size=BLOCK_SIZE, max_num_seqs=4, first_wait=0.01)


def request(name: str, *, begins_with: int = 0, salt: str | None = None) -> AddRequest:
    """Prompts that begin with the same number have the same first block."""
    return AddRequest(name, [begins_with] * BLOCK_SIZE + [7], SamplingParams(), 0, salt)


async def all_of(stream: AsyncGenerator[list[Delta], None]) -> str:
    return " ".join([delta.text async for batch in stream for delta in batch])


async def open_stream(fleet: Fleet, asked: AddRequest) -> AsyncGenerator[list[Delta], None]:
    stream = fleet.stream(asked)
    await anext(stream)
    return stream


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


# --- with real engines ------------------------------------------------------------------------------------------------


async def start(**options: Any) -> Replicas:
    return await Replicas.start(model_dir(TEXT_MODEL), count=2, **OPTIONS, **options)


def pids(engine: Replicas) -> list[int]:
    return [replica.client.pid for replica in engine._client.replicas]  # type: ignore[attr-defined]


async def last(outputs: AsyncGenerator[Any, None]) -> Any:
    async for output in outputs:
        found = output
    return found


def test_real_engines_answer_as_one_does_and_survive_a_kill() -> None:
    texts = [f"{text} {number}" for number in range(4) for text in ("Natalia sold 48 clips", "Hello, how many", "x")]
    with open_llm(TEXT_MODEL) as llm:
        expected = [output["text"] for output in llm.generate(texts, greedy_params(12), use_tqdm=False)]
        messages = [{"role": "user", "content": "How many?"}]
        chatted = llm.chat(messages, greedy_params(8), use_tqdm=False)[0]["text"]

    async def go() -> None:
        async with await start() as engine:
            assert engine.pid is None and len(set(pids(engine))) == 2 and engine.max_num_seqs == 16

            async def ask_all() -> list[str]:
                found = await asyncio.gather(*[last(engine.generate(text, greedy_params(12))) for text in texts])
                return [output["text"] for output in found]

            assert await ask_all() == expected
            assert (await last(engine.chat(messages, greedy_params(8))))["text"] == chatted
            assert len(await engine.embed([5, 6, 7], "mean")) == engine.model_config.hidden_size
            assert (await engine.stats()).num_blocks == 128

            prompts = [[5 + number] * BLOCK_SIZE for number in range(6)]
            streams = [engine.submit(ids, ENDLESS, request_id=f"{number}") for number, ids in enumerate(prompts)]
            for stream in streams:
                await anext(stream)
            homes = {name: replica.number for name, replica in engine._client._homes.items()}  # type: ignore[attr-defined]
            victim = engine._client.replicas[0]  # type: ignore[attr-defined]
            os.kill(victim.client.pid, signal.SIGKILL)
            ends: dict[int, set[str]] = {0: set(), 1: set()}
            for number, stream in enumerate(streams):
                end = "finished"
                try:
                    async for _ in stream:
                        pass
                except EngineClosedError:
                    end = "lost"
                ends[homes[str(number)]].add(end)
            assert ends == {0: {"lost"}, 1: {"finished"}}
            await engine.check_health()
            assert await ask_all() == expected  # with one replica, or both
            await until(lambda: len(pids(engine)) == 2)
            assert await ask_all() == expected
            stats = await engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks == 128
            processes = [psutil.Process(pid) for pid in pids(engine)]
        assert not any(process.is_running() for process in processes)
        with pytest.raises(EngineClosedError):
            await last(engine.generate(texts[0]))

    run(go())


def test_a_stopped_process_is_replaced() -> None:
    async def go() -> None:
        async with await start(stall_seconds=1.0) as engine:
            stopped = pids(engine)[0]
            os.kill(stopped, signal.SIGSTOP)
            asked = [asyncio.ensure_future(last(engine.generate(text, greedy_params(5)))) for text in "ab"]
            async with asyncio.timeout(PATIENCE):
                while stopped in pids(engine):
                    await asyncio.sleep(0.1)
                    with suppress(EngineError):  # on a busy machine both may look stalled for a moment
                        await engine.check_health()
            assert all(output.finished for output in await asyncio.gather(*asked))
            await until(lambda: len(pids(engine)) == 2)
            assert stopped not in pids(engine) and not psutil.pid_exists(stopped)

    run(go())


def test_a_real_prefix_is_found_again() -> None:
    async def go() -> None:
        async with await start() as engine:
            stories = [f"{name} went for a long walk through the woods and over the hills. " * 2 for name in "ABCD"]

            async def cached(story: str, end: str) -> int:
                return (await last(engine.generate(story + end, greedy_params(2)))).num_cached_tokens

            assert [await cached(story, "One") for story in stories] == [0] * 4
            assert all([await cached(story, "Two") >= 2 * BLOCK_SIZE for story in stories])

    run(go())


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        run(Replicas.start(tmp_path / "nothing", count=2))


# --- nanovllm serve ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "nanovllm", "serve", str(model_dir(TEXT_MODEL)), "--port", "0", "--replicas", "2"]
    small = ["--device", "cpu", "--dtype", "float32", "--num-kv-cache-blocks", "64", "--max-model-len", "256"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, *small], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        deadline = time.monotonic() + 60
        while httpx.get(url + "/health", timeout=10).status_code != 200:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield url, process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_served_over_http_with_the_openai_client(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    engines = [
        child for child in psutil.Process(process.pid).children() if "nanovllm.remote.service" in child.cmdline()
    ]
    assert len(engines) == 2
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id

        def chat(content: str, **settings: Any) -> Any:
            messages = [{"role": "user", "content": content}]
            return client.chat.completions.create(model=model, messages=messages, temperature=0, **settings)

        before = [chat(f"How many {n}?", max_tokens=8).choices[0].message.content for n in range(6)]
        stream = chat("Tell me", max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        engines[0].kill()
        outcome = "whole"
        try:
            for _ in stream:
                pass
        except openai.APIError:
            outcome = "cut off"  # it ran on that engine
        assert outcome in ("whole", "cut off")
        assert httpx.get(url + "/health", timeout=10).status_code == 200
        assert [chat(f"How many {n}?", max_tokens=8).choices[0].message.content for n in range(6)] == before
    view = httpx.stream("GET", url + "/engine/events", timeout=30)
    with view as response:
        assert json.loads(next(response.iter_lines()).removeprefix("data: "))["stats"]
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors, errors
    assert "2 replicas" in errors and "has ended" in errors
    for engine in engines:
        with suppress(psutil.NoSuchProcess):
            engine.wait(10)


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_wrong_number_of_replicas_is_refused(number: str) -> None:
    command = [sys.executable, "-m", "nanovllm", "serve", "--replicas", number]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 2 and "replicas" in done.stderr and "Traceback" not in done.stderr
