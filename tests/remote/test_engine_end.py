"""`AsyncLLM` when its engine ends, stalls, is closed or cannot start: errors for all requests, nothing left."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanovllm import AsyncLLM
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import CheckpointError, ConfigError, EngineClosedError, EngineError, ModelNotFoundError
from tests.helpers import TEXT_MODEL, copy_of, edit_config, greedy_params, model_dir
from tests.remote.async_engine import ENDLESS, OPTIONS, PATIENCE, TEXTS, last, start

# --- the engine dies, hangs or is closed ------------------------------------------------------------------------------


async def seconds_until_errors(tasks: list[asyncio.Task[Any]]) -> tuple[float, list[BaseException | None]]:
    began = time.monotonic()
    await asyncio.wait(tasks, timeout=PATIENCE)
    return time.monotonic() - began, [task.exception() for task in tasks]


def test_a_killed_engine_is_reported_to_everyone() -> None:
    async def ask() -> None:
        async with await start() as engine:
            assert engine.pid is not None
            feeds = [engine.generate(text, ENDLESS) for text in TEXTS]
            for feed in feeds:
                await anext(feed)
            tasks = [asyncio.create_task(last(feed)) for feed in feeds]
            os.kill(engine.pid, signal.SIGKILL)
            seconds, errors = await seconds_until_errors(tasks)
            assert seconds < 1
            assert [type(error) for error in errors] == [EngineClosedError] * len(TEXTS)
            assert "exit status -9" in str(errors[0])
            for call in (engine.check_health(), engine.stats(), last(engine.generate("x"))):
                with pytest.raises(EngineClosedError, match="exit status -9"):
                    await call

    asyncio.run(ask())


def test_a_failed_engine_tells_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: LLMEngine) -> None:
        raise ZeroDivisionError("a bug")

    async def ask() -> None:
        async with await start(in_process=True) as engine:
            feeds = [engine.generate(text, ENDLESS) for text in TEXTS]
            for feed in feeds:
                await anext(feed)
            monkeypatch.setattr(LLMEngine, "step_requests", fail)
            for feed in feeds:
                with pytest.raises(EngineClosedError, match="a bug") as caught:
                    await last(feed)
                assert "Traceback" not in str(caught.value) and "in fail" in str(caught.value.__cause__)
            with pytest.raises(EngineClosedError, match="a bug"):
                await engine.check_health()

    asyncio.run(ask())


def test_a_hanging_engine_is_unhealthy() -> None:
    async def unhealthy(engine: AsyncLLM) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                await engine.check_health()
            except EngineError as error:
                return str(error)
            await asyncio.sleep(0.05)
        return "healthy"

    async def ask() -> None:
        async with await start(stall_seconds=0.5) as engine:
            assert engine.pid is not None
            async with aclosing(engine.generate(TEXTS[0], ENDLESS)) as outputs:
                await anext(outputs)
                os.kill(engine.pid, signal.SIGSTOP)
                assert "stalled" in await unhealthy(engine)
                os.kill(engine.pid, signal.SIGCONT)
                assert (await last(outputs)).finished
                await engine.check_health()
            await engine.stats()
            os.kill(engine.pid, signal.SIGSTOP)  # while idle: the health check itself sends a ping
            assert "stalled" in await unhealthy(engine)
            os.kill(engine.pid, signal.SIGCONT)

    asyncio.run(ask())


@pytest.mark.parametrize("stopped", [False, True])
def test_close_ends_even_a_stopped_engine(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.remote.client.SECONDS_TO_STOP", 2.0)

    async def ask() -> None:
        engine = await start()
        assert engine.pid is not None
        process = psutil.Process(engine.pid)
        feed = engine.generate(TEXTS[0], ENDLESS)
        await anext(feed)
        task = asyncio.create_task(last(feed))
        if stopped:
            process.suspend()
        await asyncio.gather(engine.close(), engine.close())
        assert not process.is_running()
        with pytest.raises(EngineClosedError, match="was closed"):
            await task
        await engine.close()
        with pytest.raises(EngineClosedError, match="was closed"):
            await engine.check_health()

    asyncio.run(ask())


@pytest.mark.parametrize("in_process", [False, True])
def test_nothing_is_left_behind(in_process: bool) -> None:
    async def use() -> None:
        async with await start(in_process=in_process) as engine:
            await last(engine.generate(TEXTS[0], greedy_params(2)))

    asyncio.run(use())  # libraries open some files once and keep them
    this = psutil.Process()
    before = this.num_fds(), threading.active_count()
    asyncio.run(use())
    assert (this.num_fds(), threading.active_count()) == before
    assert not [child for child in this.children(recursive=True) if "nanovllm.remote.service" in child.cmdline()]


PARENT = """
import asyncio, sys
from nanovllm import AsyncLLM

async def main():
    engine = await AsyncLLM.start(sys.argv[1], device="cpu", max_model_len=256, num_kv_cache_blocks=64)
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_engine_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, str(model_dir(TEXT_MODEL))]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []


def test_a_child_whose_parent_is_gone_before_it_began_ends() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "nanovllm.remote.service", str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[2])
    ours.close()
    child.wait(PATIENCE)


# --- engines that cannot start ----------------------------------------------------------------------------------------


def engine_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "nanovllm.remote.service" in p.cmdline()]


def test_a_wrong_option_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.remote.client.ProcessHost", None)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        asyncio.run(start(max_num_seq=3))
    with pytest.raises(ConfigError, match="dtype"):
        asyncio.run(start(dtype="float12"))


@pytest.mark.parametrize("in_process", [False, True])
def test_errors_of_the_start_keep_their_class(in_process: bool, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nothing"):
        asyncio.run(AsyncLLM.start(tmp_path / "nothing", in_process=in_process))
    with pytest.raises(ConfigError, match="float16") as caught:  # refused on a CPU, by the engine process
        asyncio.run(start(in_process=in_process, dtype="float16"))
    assert "Traceback" in str(caught.value.__cause__)


def test_an_error_of_the_engine_alone_keeps_its_class(tmp_path: Path) -> None:
    folder = copy_of(TEXT_MODEL, tmp_path)
    edit_config(folder, lambda config: config.update(intermediate_size=96))
    with pytest.raises(CheckpointError) as caught:
        asyncio.run(AsyncLLM.start(folder, **OPTIONS))
    assert "Traceback" in str(caught.value.__cause__)
    assert not engine_processes()


def test_a_cancelled_start_leaves_no_process() -> None:
    async def begin_and_leave() -> None:
        starting = asyncio.create_task(start())
        while not engine_processes():
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(begin_and_leave())
    assert not engine_processes()
