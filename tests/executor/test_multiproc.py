"""Worker processes without a model: messages in both directions, and every kind of failure."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanovllm.bench.executor_overhead import measure, open_executor
from nanovllm.config import Config
from nanovllm.errors import ConfigError, EngineClosedError, EngineError
from nanovllm.executor import workers
from nanovllm.executor.multiproc import ProcessWorkers
from nanovllm.executor.workers import WorkersExecutor
from nanovllm.plan import NewRow, RowStep, StepPlan, StepResult
from nanovllm.sampling_params import SamplingParams, StructuredOutputs
from tests.executor.fake_worker import (
    ECHO,
    HANG,
    KILLED,
    LONG_RESULT,
    NUM_LONG,
    RAISE,
    SLOW,
    SLOW_SECONDS,
    SPLIT,
    STOPPED,
)
from tests.executor.processes import all_gone, is_gone, until

COMMAND = (sys.executable, "-m", "tests.executor.fake_worker")


def open_fake(path: str = "", *, size: int = 2, **options: Any) -> WorkersExecutor:
    config = Config(tensor_parallel_size=size, **options)
    return WorkersExecutor(ProcessWorkers(size, command=COMMAND), config, Path(path), max_model_len=1)


def plan_of(what: int, token: int = 1) -> StepPlan:
    return StepPlan(decode_rows=(what, token))


def run_one(executor: WorkersExecutor, token: int) -> None:
    assert executor.launch(plan_of(ECHO, token)).wait().tokens == [[token]]


def pids_of(executor: WorkersExecutor) -> list[int]:
    return executor._workers.pids  # type: ignore[attr-defined]


@pytest.fixture
def executor() -> Iterator[WorkersExecutor]:
    opened = open_fake()
    yield opened
    opened.close()
    assert all(map(is_gone, pids_of(opened)))


# --- results ----------------------------------------------------------------------------------------------------------


def test_the_start_tells_the_smallest_cache_and_how_long_it_took(executor: WorkersExecutor) -> None:
    assert executor.num_blocks == 99
    assert executor.startup_seconds == {"fake": 1.5}
    assert executor.runs_beside_host


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_results_belong_to_their_plans(executor: WorkersExecutor, depth: int) -> None:
    pending = []
    for number in range(40):
        token = number // 3  # some plans are equal, and so are their frames
        pending.append((token, executor.launch(plan_of(ECHO, token))))
        if len(pending) > depth:
            token, step = pending.pop(0)
            assert step.wait().tokens == [[token]]
    for token, step in pending:
        assert step.wait().tokens == [[token]]


def test_a_pooled_vector_comes_back_between_steps(executor: WorkersExecutor) -> None:
    first = executor.launch(plan_of(ECHO, 5))
    second = executor.launch(plan_of(ECHO, 6))
    pooling = executor.launch(StepPlan(row_steps=(RowStep(3, 0, 4, pooling="last"),)))
    assert first.wait().tokens == [[5]]
    assert second.wait().tokens == [[6]]
    assert pooling.wait() == StepResult(pooled={3: [0.0, 4.0]})


def test_masks_reach_the_step_launched_last(executor: WorkersExecutor) -> None:
    before = executor.launch(plan_of(ECHO, 1))
    guided = executor.launch(StepPlan(decode_rows=(4, 9), guided_rows=(4, 9)))
    assert before.wait().tokens == [[1]]
    guided.sample({4: [b"\x00\xff"], 9: [b"\x07", b"\x08"]})
    after = executor.launch(plan_of(ECHO, 2))
    assert guided.wait().tokens == [[4, 0, 255], [9, 7, 8]]
    assert after.wait().tokens == [[2]]


def test_plans_and_results_of_any_size(executor: WorkersExecutor) -> None:
    token_ids = tuple(random.Random(0).choices(range(200_000), k=1_000_000))
    row = NewRow(1, token_ids, len(token_ids), (), SamplingParams(), 0, (), ())
    first = executor.launch(StepPlan(new_rows=(row,)))  # 4 MB, more than a socket holds
    second = executor.launch(plan_of(ECHO, 2))
    assert first.wait().tokens == [list(token_ids)]
    assert second.wait().tokens == [[2]]
    result = executor.launch(plan_of(LONG_RESULT, 3)).wait()
    assert [entry.token_ids for entry in result.prompt_logprobs[7]] == [(number,) for number in range(NUM_LONG)]


def test_texts_and_limits_of_any_kind_do_no_harm(executor: WorkersExecutor) -> None:
    params = SamplingParams(stop="\ud800", bad_words=["\udfff"], max_tokens=10**30)
    guided = SamplingParams(structured_outputs=StructuredOutputs(json_object=True), temperature=0.5)
    rows = tuple(NewRow(number, (1, number), 1, (), p, 0, (), ()) for number, p in enumerate((params, guided)))
    assert executor.launch(StepPlan(new_rows=rows)).wait().tokens == [[1, 0], [1, 1]]


def test_executors_live_side_by_side(executor: WorkersExecutor) -> None:
    other = open_fake()
    mine, theirs = executor.launch(plan_of(ECHO, 1)), other.launch(plan_of(ECHO, 2))
    assert (theirs.wait().tokens, mine.wait().tokens) == ([[2]], [[1]])
    os.kill(pids_of(other)[0], signal.SIGKILL)
    with pytest.raises(EngineError):
        other.launch(plan_of(ECHO, 2)).wait()
    run_one(executor, 3)


def test_idle_workers_use_no_time(executor: WorkersExecutor) -> None:
    run_one(executor, 1)
    workers = [psutil.Process(pid) for pid in pids_of(executor)]
    before = [sum(worker.cpu_times()[:2]) for worker in workers]
    time.sleep(0.5)
    assert all(sum(worker.cpu_times()[:2]) - then < 0.05 for worker, then in zip(workers, before, strict=True))


def test_a_step_costs_little() -> None:
    # 0.2 ms on an idle machine; the limit allows for a busy one, but not for a sleep or periodic polling.
    executor = open_executor(2)
    times = measure(executor, [StepPlan(decode_rows=tuple(range(256)))] * 300, depth=1)
    executor.close()
    assert sorted(times)[len(times) // 4] < 3000


# --- failures ---------------------------------------------------------------------------------------------------------


def assert_dead(executor: WorkersExecutor, message: str) -> None:
    assert all_gone(pids_of(executor))
    for call in (lambda: executor.launch(plan_of(ECHO)), executor.check):
        with pytest.raises(EngineClosedError, match=message) as raised:
            call()
        assert isinstance(raised.value.__cause__, EngineError)
    executor.close()


@pytest.mark.parametrize("what", [RAISE, KILLED])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_worker_that_fails_in_a_step_ends_all(what: int, depth: int) -> None:
    executor = open_fake()
    run_one(executor, 1)
    steps = [executor.launch(plan_of(ECHO, 1)) for _ in range(depth)]
    steps.append(executor.launch(plan_of(what)))
    message = {RAISE: "rank 1 failed: ValueError: the model is on fire", KILLED: "rank 1 was killed by signal 9"}[what]
    with pytest.raises(EngineError, match=message) as raised:
        for step in steps:
            step.wait()
    if what == RAISE:
        assert 'raise ValueError("the model is on fire")' in str(raised.value.__cause__)
    assert_dead(executor, message)


@pytest.mark.parametrize(
    ("what", "silent"), [(HANG, "rank 0 and rank 1 have"), (STOPPED, "rank 0 and rank 1 have"), (SLOW, "rank")]
)
def test_a_worker_that_hangs_is_not_waited_for(what: int, silent: str) -> None:
    executor = open_fake(worker_timeout=SLOW_SECONDS / 2)
    begin = time.monotonic()
    with pytest.raises(EngineError, match=f"{silent}.* not answered for 0.2 s"):
        executor.launch(plan_of(what)).wait()
    assert time.monotonic() - begin < 5
    assert_dead(executor, "not answered")


def test_a_worker_that_ends_while_nothing_is_asked_takes_the_others_with_it() -> None:
    executor = open_fake()
    executor.check()
    os.kill(pids_of(executor)[0], signal.SIGKILL)
    assert all_gone(pids_of(executor))
    with pytest.raises(EngineError, match="rank 0 was killed by signal 9"):
        executor.check()
    assert_dead(executor, "rank 0 was killed")


def test_ranks_that_disagree_are_found_out() -> None:
    executor = open_fake()
    run_one(executor, 1)
    with pytest.raises(EngineError, match="ranks disagree about the tokens.*rank 0: [0-9a-f]{8}, rank 1: [0-9a-f]{8}"):
        executor.launch(plan_of(SPLIT)).wait()
    assert_dead(executor, "disagree")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_start_raises_is_raised(rank: int) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError, match="^these options cannot be honoured$") as raised:
        open_fake(f"raise in rank {rank}")
    assert f"in rank {rank}:" in str(raised.value.__cause__)
    assert set(psutil.Process().children()) <= before


def test_a_worker_that_ends_in_its_start() -> None:
    before = set(psutil.Process().children())
    with pytest.raises(EngineError, match="rank 1 ended with exit status 3"):
        open_fake("exit")
    assert set(psutil.Process().children()) <= before


# --- shutdown ---------------------------------------------------------------------------------------------------------


def test_close_lets_workers_end_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    executor = open_fake()
    executor.launch(plan_of(SLOW))  # finishes first
    executor.close()
    statuses = [popen.returncode for popen in executor._workers._processes._popens]  # type: ignore[attr-defined]
    assert statuses == [0, 0]
    assert sorted(capfd.readouterr().err.splitlines())[-2:] == [
        f"the runner of rank {rank} is closed" for rank in range(2)
    ]
    executor.close()
    with pytest.raises(EngineClosedError):
        executor.launch(plan_of(ECHO))


def test_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SECONDS_TO_STOP", 0.3)
    executor = open_fake()
    executor.launch(plan_of(HANG))
    begin = time.monotonic()
    executor.close()
    assert time.monotonic() - begin < 5
    assert all(map(is_gone, pids_of(executor)))


def test_an_executor_that_nobody_closed_leaves_nothing() -> None:
    executor = open_fake()
    pids = pids_of(executor)
    run_one(executor, 1)
    del executor
    assert all_gone(pids)


PARENT = """
import sys, time
from tests.executor.test_multiproc import open_fake, pids_of, plan_of
executor = open_fake()
print(*pids_of(executor), flush=True)
executor.launch(plan_of(int(sys.argv[1]))).wait()
executor.launch(plan_of(int(sys.argv[1]))).wait()
time.sleep(1000)
"""


@pytest.mark.parametrize("what", [ECHO, HANG])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_parents_death_takes_the_workers_with_it(what: int, number: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(what)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.killpg(parent.pid, number) if number == signal.SIGINT else parent.kill()
        assert all_gone([*pids, parent.pid])


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_the_workers_usable(executor: WorkersExecutor) -> None:
    for depth in (1, 2):
        steps = [executor.launch(plan_of(SLOW, 77)) for _ in range(depth)]
        timer = threading.Timer(SLOW_SECONDS / 4, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for step in steps:
                step.wait()
        timer.join()
        run_one(executor, depth)


def test_ctrl_c_at_any_moment_leaves_the_streams_whole(executor: WorkersExecutor) -> None:
    generator = random.Random(0)
    num_interrupts = 0

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.00005, 0.003))
                for token in range(100_000):
                    first, second = executor.launch(plan_of(ECHO, token)), executor.launch(plan_of(ECHO, token + 1))
                    assert (first.wait().tokens, second.wait().tokens) == ([[token]], [[token + 1]])
            except KeyboardInterrupt:
                num_interrupts += 1
            run_one(executor, number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert num_interrupts == 300
    assert until(lambda: len(executor._answers) < 20)
