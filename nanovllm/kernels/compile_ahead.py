"""Compile kernels in a pool of processes before they are needed.

Half of Triton's compile time is spent in Python, so threads would wait for each other. The compile workers are forked
processes that write to Triton's cache on disk and report each finished kernel. Threads of this process then load the
kernel from the cache. At the end this process compiles whatever no worker reported, so a worker may fail. Once all
kernels were loaded, a marker file in the cache records it, and the next start forks no workers.
"""

import hashlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.kernels.launch import argument_kinds, loading_lock, record_launches
from nanovllm.kernels.select import SLOW_TO_COMPILE
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)

# A forked worker inherits locks that threads of this process held at the fork, and may deadlock on one. After this time
# the workers are stopped and this process compiles the rest.
TIMEOUT_SECONDS = 60
MAX_WORKERS = 16  # each takes some hundred megabytes
# Guards Triton's own process-wide initialization, which is not safe to run in two threads.
_preparing = threading.Lock()


class Job(NamedTuple):
    """One launch to compile for."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]

    def kind(self) -> tuple:
        """Equal for launches that the same compiled kernel serves."""
        kinds, _ = argument_kinds(self.args)
        return self.kernel.__module__, self.kernel.__name__, *sorted(self.options.items()), *kinds

    def order(self) -> int:
        """The slowest kernels to compile come first: started last, each would delay the end."""
        name = self.kernel.__name__
        return SLOW_TO_COMPILE.index(name) if name in SLOW_TO_COMPILE else len(SLOW_TO_COMPILE)

    def compile(self) -> Any:
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


def prepare_triton() -> None:
    """Do Triton's one-time work before the first kernel: hash its own installation (half a gigabyte, part of the cache
    key) and initialize its driver."""
    with _preparing:
        import triton

        # A private function. If a version does not have it, the first kernel does the same work.
        if read_itself := getattr(triton.runtime.cache, "triton_key", None):
            read_itself()
        import torch

        if torch.cuda.is_available():
            _ = triton.runtime.driver.active


@contextmanager
def compile_ahead(launches: Callable[[], None], *, num_local_processes: int = 1) -> Iterator[Callable[[], None]]:
    """Compile the kernels that `launches()` would launch, in the background while the body runs.

    The body receives a function that waits for all kernels and must call it before it ends; else compilation is
    cancelled. `num_local_processes` processes of this machine compile at the same time and divide its cores.
    """
    import torch

    jobs_by_kind: dict[tuple, Job] = {}

    def record(*launch: Any) -> None:
        job = Job(*launch)
        jobs_by_kind.setdefault(job.kind(), job)

    with record_launches(record):
        launches()
    prepare_triton()
    driver = DriverSnapshot()
    all_loaded = driver.cache / f"nanovllm-{_fingerprint(driver.setting, jobs_by_kind)}"
    jobs = sorted(jobs_by_kind.values(), key=Job.order)
    num_cores = max(1, len(os.sched_getaffinity(0)) // num_local_processes)
    num_workers = 0 if all_loaded.exists() else min(len(jobs), num_cores, MAX_WORKERS)
    workers = CompileWorkers(jobs, driver, count=num_workers)
    # kernels are loaded onto the current device, which is a setting of each thread
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)) as pool:

        def load_all() -> None:
            loads = {number: pool.submit(_load, jobs[number]) for number in workers.finished()}
            if not workers.cancelled:
                rest = [job for number, job in enumerate(jobs) if number not in loads]
                for load in [*loads.values(), *[pool.submit(_load, job) for job in rest]]:
                    load.result()

        loaded = pool.submit(load_all)

        def wait() -> None:
            loaded.result()
            with suppress(OSError):  # a read-only cache: the next start forks workers again
                all_loaded.touch()

        try:
            yield wait
        finally:
            workers.cancel()
            pool.shutdown(cancel_futures=True)


def _fingerprint(setting: str, kinds: Iterable[tuple]) -> str:
    """Identifies a set of kernels: their sources, argument kinds, and what they are compiled by and for."""
    digest = hashlib.sha256(repr((setting, sorted(map(repr, kinds)))).encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _load(job: Job) -> None:
    """Load a compiled kernel. Reading its `run` attribute also loads its launcher."""
    compiled = job.compile()
    with loading_lock:
        _ = compiled.run


class DriverSnapshot:
    """Stands in for Triton's driver in the workers: the parent's answers, so that workers never touch the device."""

    def __init__(self) -> None:
        import triton

        driver = triton.runtime.driver.active
        self._device, self._target = driver.get_current_device(), driver.get_current_target()
        self.launcher_cls = driver.launcher_cls
        self.cache = Path(triton.knobs.cache.dir)
        self.setting = f"Triton {triton.__version__} for {self._target}"

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


class CompileWorkers:
    """Forked processes that take job numbers from one pipe and report finished ones through another."""

    def __init__(self, jobs: list[Job], driver: DriverSnapshot, *, count: int) -> None:
        numbers, write_numbers = os.pipe()
        os.write(write_numbers, b"".join(number.to_bytes(2, "big") for number in range(len(jobs))))
        os.close(write_numbers)
        self._reports, report = os.pipe()  # reads return end-of-file once all workers have ended
        self._lock = threading.Lock()
        self.cancelled = False
        self._pids: list[int] = []
        for _ in range(count):
            try:
                pid = os.fork()
            except OSError:  # a limit on memory or processes: fewer workers
                break
            if pid == 0:
                try:
                    _compile_jobs(numbers, report, jobs, driver)
                finally:
                    os._exit(0)
            self._pids.append(pid)
        os.close(report)
        os.close(numbers)

    def finished(self) -> Iterator[int]:
        """Job numbers as workers finish them, until all workers have ended, were cancelled or timed out."""
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        end = time.monotonic() + TIMEOUT_SECONDS
        try:
            while poll.poll(max(0.0, end - time.monotonic()) * 1000):
                if not (number := os.read(self._reports, 2)):
                    return
                yield int.from_bytes(number, "big")
            logger.warning(
                "the processes that compile kernels did not end within %d s: compiling the rest in this process",
                TIMEOUT_SECONDS,
            )
        finally:
            os.close(self._reports)
            self._stop()

    def cancel(self) -> None:
        self.cancelled = True
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            while self._pids:
                pid = self._pids.pop()
                os.kill(pid, signal.SIGKILL)  # no effect on a worker that has ended and was not waited for
                os.waitpid(pid, 0)


def _compile_jobs(numbers: int, report: int, jobs: list[Job], driver: DriverSnapshot) -> None:
    """The body of a worker."""
    import triton

    triton.runtime.driver.set_active(driver)
    while number := os.read(numbers, 2):
        with suppress(Exception):  # the parent compiles what is not reported, and raises the same error
            compiled = jobs[int.from_bytes(number, "big")].compile()
            driver.launcher_cls(compiled.src, compiled.metadata)  # compiles the launcher's C code
            os.write(report, number)
