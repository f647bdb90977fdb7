"""The thread pool: every chunk exactly once, with more threads than cores, beside busy processes; no CPU when idle."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanovllm.native.build import SOURCES, library
from tests.native.sanitizers import build_program, run_program

STRESS = [Path(__file__).parent / "pool_stress.c", SOURCES / "pool.c"]
WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("sanitizers", ["", "thread", "address,undefined"])
def test_every_chunk_is_worked_on_once(sanitizers: str, tmp_path: Path) -> None:
    program = build_program(STRESS, tmp_path / "stress", sanitizers)
    oversubscribed = 3 * len(os.sched_getaffinity(0))
    for num_threads, num_runs, microseconds in [(1, 500, 0), (2, 5000, 0), (oversubscribed, 5000, 0), (4, 1000, 100)]:
        run_program(program, num_threads, num_runs, microseconds)


def test_beside_busy_processes(tmp_path: Path) -> None:
    program = build_program(STRESS, tmp_path / "stress")
    with busy_processes(len(os.sched_getaffinity(0))):
        run_program(program, 4, 3000, 0)


@pytest.fixture
def pools() -> ctypes.CDLL:
    found = library()
    if found is None:
        pytest.skip("needs a C compiler and a CPU that the native library supports")
    found.pool_create.restype = ctypes.c_void_p
    found.pool_create.argtypes = [ctypes.c_int]
    found.pool_num_threads.argtypes = [ctypes.c_void_p]
    found.pool_run.argtypes = [ctypes.c_void_p, WORK, ctypes.c_void_p, ctypes.c_int]
    found.pool_destroy.argtypes = [ctypes.c_void_p]
    return found


def test_a_chunk_that_blocks_holds_up_no_other(pools: ctypes.CDLL) -> None:
    pool = pools.pool_create(3)
    done: set[int] = set()
    others_done = threading.Event()

    def work(_: int, chunk: int) -> None:
        if chunk == 0:
            assert others_done.wait(60)
        done.add(chunk)
        if len(done) == 19:
            others_done.set()

    pools.pool_run(pool, WORK(work), None, 20)
    assert done == set(range(20))
    pools.pool_destroy(pool)


def test_sleepers_are_woken(pools: ctypes.CDLL) -> None:
    pool = pools.pool_create(2)
    caller = threading.get_ident()
    for _ in range(3):
        time.sleep(0.01)  # the worker falls asleep
        both_work = threading.Barrier(2)
        done: set[int] = set()

        def work(_: int, chunk: int, both_work: threading.Barrier = both_work, done: set[int] = done) -> None:
            both_work.wait(60)
            if threading.get_ident() != caller:
                time.sleep(0.01)  # the caller falls asleep
            done.add(chunk)

        pools.pool_run(pool, WORK(work), None, 2)
        assert done == {0, 1}
    pools.pool_destroy(pool)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_destroy_ends_the_threads(pools: ctypes.CDLL) -> None:
    before = num_threads()
    made = [pools.pool_create(4), pools.pool_create(3)]
    assert [pools.pool_num_threads(pool) for pool in made] == [4, 3]
    assert num_threads() == before + 5
    for pool in made:
        pools.pool_destroy(pool)
    assert num_threads() == before


def test_an_idle_pool_uses_no_cpu(pools: ctypes.CDLL) -> None:
    pool = pools.pool_create(4)
    pools.pool_run(pool, WORK(lambda _, chunk: None), None, 8)
    time.sleep(0.05)  # much longer than workers stay awake
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.1  # three awake workers would use 0.5 s of each core
    pools.pool_destroy(pool)
