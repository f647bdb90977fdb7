"""Engines whose ranks are processes: the same answers as one process, and all ranks end when one fails."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanovllm import LLM, AsyncLLM, RequestOutput
from nanovllm.errors import CheckpointError, EngineClosedError, EngineError
from nanovllm.executor import multiproc
from tests.executor.processes import all_gone, children, until
from tests.executor.same_answers import CASES, TEXTS, answers, assert_abort_harms_no_other, assert_same
from tests.helpers import TEXT_MODEL, copy_of, edit_config, greedy_params, model_dir, open_llm

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "tensor, no overlap": {"tensor_parallel_size": 2, "overlap": False},
    "pipeline": {"pipeline_parallel_size": 2},
    "one in a process": {"distributed_executor_backend": "mp"},
}


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[RequestOutput]]:
    """The answers of a one-rank engine in this process."""
    with open_llm(TEXT_MODEL) as llm:
        return {name: answers(llm, params) for name, params in CASES.items()}


@pytest.fixture(scope="module")
def embedding() -> list[float]:
    with open_llm(TEXT_MODEL) as llm:
        return llm.embed([5, 6, 7], "mean")


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(TEXT_MODEL, **LAYOUTS[request.param]) as llm:
        yield llm
        pids = pids_of(llm)
    assert all_gone(pids)


def pids_of(llm: LLM) -> list[int]:
    return llm.llm_engine._core.executor._workers.pids  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_one_process(llm: LLM, case: str, wanted: dict[str, list[RequestOutput]]) -> None:
    assert_same(answers(llm, CASES[case]), wanted[case])


def test_abort(llm: LLM, wanted: dict[str, list[RequestOutput]]) -> None:
    assert_abort_harms_no_other(llm, wanted["greedy"])


def test_embedding(llm: LLM, embedding: list[float]) -> None:
    assert llm.embed([5, 6, 7], "mean") == pytest.approx(embedding, abs=1e-5)


def test_steps_run_beside_the_host(llm: LLM) -> None:
    assert llm.llm_engine._core.depth == (1 if llm.config.overlap is None else 0)


@pytest.mark.parametrize("llm", ["tensor"], indirect=True)
def test_two_engines_at_once(llm: LLM, wanted: dict[str, list[RequestOutput]]) -> None:
    with open_llm(TEXT_MODEL, pipeline_parallel_size=2) as other:
        for engine in (llm, other):
            for text in TEXTS:
                engine.add_request(text, CASES["greedy"])
        done: dict[LLM, dict[str, RequestOutput]] = {llm: {}, other: {}}
        while not (llm.is_finished() and other.is_finished()):
            for engine in (llm, other):
                if not engine.is_finished():
                    done[engine] |= {output.request_id: output for output in engine.step()}
    for outputs in done.values():
        assert_same([outputs[name] for name in sorted(outputs, key=int)], wanted["greedy"])


# --- failures ---------------------------------------------------------------------------------------------------------


def begin(llm: LLM) -> None:
    """Start requests that run for a while."""
    for text in TEXTS:
        llm.add_request(text, greedy_params(200))
    for _ in range(5):
        llm.step()


def step_until_it_raises(llm: LLM, message: str) -> EngineError:
    with pytest.raises(EngineError, match=message) as raised:
        while True:
            llm.step()
    return raised.value


def assert_dead(llm: LLM, pids: list[int], message: str) -> None:
    assert all_gone(pids)
    for call in (lambda: llm.generate("x", use_tqdm=False), llm.step, llm.check_health, lambda: llm.embed([1])):
        with pytest.raises(EngineClosedError, match=message) as raised:
            call()
        assert isinstance(raised.value.__cause__, EngineError)
    llm.close()


@pytest.mark.parametrize(("layout", "rank"), [("tensor", 1), ("pipeline", 0)])
def test_a_killed_worker_ends_the_engine(layout: str, rank: int) -> None:
    llm = open_llm(TEXT_MODEL, **LAYOUTS[layout])
    pids = pids_of(llm)
    begin(llm)
    os.kill(pids[rank], signal.SIGKILL)
    step_until_it_raises(llm, f"a step failed and the engine is closed: rank {rank} was killed by signal 9")
    assert_dead(llm, pids, f"rank {rank} was killed by signal 9")


def test_a_stopped_worker_ends_the_engine() -> None:
    llm = open_llm(TEXT_MODEL, tensor_parallel_size=2, worker_timeout=3)
    pids = pids_of(llm)
    begin(llm)
    os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    step_until_it_raises(llm, "rank 1 (have|has) not answered for 3 s")
    assert time.monotonic() - began < 10
    assert_dead(llm, pids, "not answered for 3 s")


def test_a_model_that_raises_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiproc, "WORKER", (sys.executable, "-m", "tests.executor.broken_model_worker"))
    llm = open_llm(TEXT_MODEL, tensor_parallel_size=2)
    pids = pids_of(llm)
    error = step_after_step(llm)
    assert "rank 1 failed: ZeroDivisionError: the layers are out of order" in str(error)
    assert error.__cause__ is not None
    assert "in breaking" in str(error.__cause__.__cause__)  # the worker's traceback
    assert_dead(llm, pids, "the layers are out of order")


def step_after_step(llm: LLM) -> EngineError:
    for text in TEXTS:
        llm.add_request(text, greedy_params(200))
    return step_until_it_raises(llm, "a step failed")


def test_a_start_that_fails_raises_what_one_process_raises(tmp_path: Path) -> None:
    folder = copy_of(TEXT_MODEL, tmp_path)
    edit_config(folder, lambda config: config.update(num_hidden_layers=4))
    before = set(children())
    told = []
    for size in (1, 2):
        with pytest.raises(CheckpointError) as raised:
            open_llm(folder, tensor_parallel_size=size)
        told.append((type(raised.value), str(raised.value)))
    assert told[0] == told[1]
    assert set(children()) <= before


PARENT = """
import sys
from nanovllm import LLM, SamplingParams
options = dict(device="cpu", max_model_len=256, max_num_seqs=8, num_kv_cache_blocks=64, tensor_parallel_size=2)
llm = LLM(sys.argv[1], **options)
print(*llm.llm_engine._core.executor._workers.pids, flush=True)
while True:
    llm.generate("x", SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
"""


def test_the_workers_end_with_their_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_dir(TEXT_MODEL))], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        assert all_gone(pids)


@pytest.mark.parametrize("idle", [False, True])
def test_a_killed_worker_makes_an_async_engine_unhealthy(idle: bool) -> None:
    async def scenario() -> None:
        engine = await AsyncLLM.start(
            model_dir(TEXT_MODEL), device="cpu", max_model_len=256, num_kv_cache_blocks=64, tensor_parallel_size=2
        )
        try:
            await engine.check_health()
            assert engine.pid is not None
            workers = [child.pid for child in psutil.Process(engine.pid).children()]
            assert len(workers) == 2
            if idle:
                os.kill(workers[1], signal.SIGKILL)
            else:
                with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
                    async for output in engine.generate(TEXTS[0], greedy_params(200)):
                        if len(output["token_ids"]) == 5:
                            os.kill(workers[1], signal.SIGKILL)
            with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
                async with asyncio.timeout(20):
                    while True:
                        await engine.check_health()
                        await asyncio.sleep(0.05)
            assert await asyncio.to_thread(all_gone, [*workers, engine.pid])
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_ctrl_c_leaves_the_engine_usable(wanted: dict[str, list[RequestOutput]]) -> None:
    with open_llm(TEXT_MODEL, tensor_parallel_size=2) as llm:
        for delay in (0.02, 0.05, 0.011):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    llm.generate(TEXTS, greedy_params(200), use_tqdm=False)
            assert_same(answers(llm, CASES["greedy"]), wanted["greedy"])
        assert until(llm.is_finished)
