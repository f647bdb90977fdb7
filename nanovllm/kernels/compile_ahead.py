"""Kernels compiled before they are needed, by processes side by side.

Half of what Triton does to compile a kernel is Python, for which threads would wait for one another. So children are
forked that leave what they compile in Triton's cache on disk, and tell of it. Threads of this process load it from
there, and at the end compile what nobody told of: children may fail, and are not needed. Where all was loaded once, a
file in that cache says so, and the next start forks none.
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

from nanovllm.kernels.launch import collecting, described, loading
from nanovllm.kernels.select import SLOW_TO_COMPILE
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)

PATIENCE = 60  # seconds, after which children are taken to hang: they have locks of threads that they have not
MAX_CHILDREN = 16  # each takes some hundred megabytes
_preparing = threading.Lock()


class Job(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]

    def kind(self) -> tuple:
        kinds, _ = described(self.args)
        return self.kernel.__module__, self.kernel.__name__, *sorted(self.options.items()), *kinds

    def rank(self) -> int:
        name = self.kernel.__name__
        return SLOW_TO_COMPILE.index(name) if name in SLOW_TO_COMPILE else len(SLOW_TO_COMPILE)

    def compile(self) -> Any:
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


def prepare_triton() -> None:
    """What Triton does before it compiles or loads its first kernel. For its cache's key it reads all of itself, half a
    gigabyte: once, and not in every thread."""
    with _preparing:
        import triton

        # not part of its interface: without it, the first kernels do the same
        if read_itself := getattr(triton.runtime.cache, "triton_key", None):
            read_itself()
        import torch

        if torch.cuda.is_available():
            _ = triton.runtime.driver.active


@contextmanager
def compile_ahead(launches: Callable[[], None], *, num_sharers: int = 1) -> Iterator[Callable[[], None]]:
    """Compile the kernels that `launches` would launch beside what is done within, before whose end the function that
    this gives must be called: it waits for them. `num_sharers` processes do the same on this machine."""
    import torch

    of_kind: dict[tuple, Job] = {}

    def collect(*launch: Any) -> None:
        job = Job(*launch)
        of_kind.setdefault(job.kind(), job)

    with collecting(collect):
        launches()
    prepare_triton()
    parent = Parent()
    known = parent.cache / f"nanovllm-{_fingerprint(parent.setting, of_kind)}"
    jobs = sorted(of_kind.values(), key=Job.rank)
    processors = max(1, len(os.sched_getaffinity(0)) // num_sharers)
    num_children = 0 if known.exists() else min(len(jobs), processors, MAX_CHILDREN)
    children = Children(jobs, parent, count=num_children)
    # the device that kernels are loaded onto is each thread's own affair
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)) as pool:

        def load_all() -> None:
            loads = {number: pool.submit(_load, jobs[number]) for number in children.done()}
            if not children.abandoned:
                rest = [job for number, job in enumerate(jobs) if number not in loads]
                for load in [*loads.values(), *[pool.submit(_load, job) for job in rest]]:
                    load.result()

        loaded = pool.submit(load_all)

        def wait() -> None:
            loaded.result()
            with suppress(OSError):  # where nothing can be written, nothing is known at the next start
                known.touch()

        try:
            yield wait
        finally:
            children.abandon()
            pool.shutdown(cancel_futures=True)


def _fingerprint(setting: str, kinds: Iterable[tuple]) -> str:
    """Of kernels as they are written today, and of what they are compiled for and by."""
    digest = hashlib.sha256(repr((setting, sorted(map(repr, kinds)))).encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _load(job: Job) -> None:
    """What was compiled, and by asking for its `run` also the piece of C that launches it."""
    compiled = job.compile()
    with loading:
        _ = compiled.run


class Parent:
    """What a child may ask of Triton's driver: as its parent would have been answered, without touching the device."""

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


class Children:
    """Each takes a job after the other from a pipe, and tells of what it has done by a second one."""

    def __init__(self, jobs: list[Job], parent: Parent, *, count: int) -> None:
        numbers, write_numbers = os.pipe()
        os.write(write_numbers, b"".join(number.to_bytes(2, "big") for number in range(len(jobs))))
        os.close(write_numbers)
        self._told, tell = os.pipe()  # its end is reached when no child has it any more
        self._lock = threading.Lock()
        self.abandoned = False
        self._pids: list[int] = []
        for _ in range(count):
            try:
                pid = os.fork()
            except OSError:  # no room for another
                break
            if pid == 0:
                try:
                    _work(numbers, tell, jobs, parent)
                finally:
                    os._exit(0)
            self._pids.append(pid)
        os.close(tell)
        os.close(numbers)

    def done(self) -> Iterator[int]:
        """The numbers of jobs as they get done, until all children have ended, or were given up."""
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        end = time.monotonic() + PATIENCE
        try:
            while poll.poll(max(0.0, end - time.monotonic()) * 1000):
                if not (number := os.read(self._told, 2)):
                    return
                yield int.from_bytes(number, "big")
            logger.warning("processes that compile kernels have not ended within %d s: going on without", PATIENCE)
        finally:
            os.close(self._told)
            self._end()

    def abandon(self) -> None:
        self.abandoned = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            while self._pids:
                pid = self._pids.pop()
                os.kill(pid, signal.SIGKILL)  # which does nothing to one that has ended
                os.waitpid(pid, 0)


def _work(numbers: int, tell: int, jobs: list[Job], parent: Parent) -> None:
    import triton

    triton.runtime.driver.set_active(parent)
    while number := os.read(numbers, 2):
        with suppress(Exception):  # the parent will meet it too, and tell
            compiled = jobs[int.from_bytes(number, "big")].compile()
            parent.launcher_cls(compiled.src, compiled.metadata)  # the piece of C
            os.write(tell, number)
