"""Several engines as one, with real engine processes: through `Replicas` and through `nanovllm serve`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from nanovllm.errors import EngineClosedError, EngineError, ModelNotFoundError
from nanovllm.remote.replicas import Replicas
from tests.helpers import TEXT_MODEL, greedy_params, model_dir, open_llm
from tests.remote.fake_replicas import BLOCK_SIZE, PATIENCE, run, until

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_block_size": BLOCK_SIZE,
    "num_kv_cache_blocks": 64,
}
ENDLESS = greedy_params(200)


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
