"""Triton kernels, one operation a file: its plain torch reference, the kernel, and what launches it."""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

_ahead: ContextVar["CompileAhead | None"] = ContextVar("compile_ahead", default=None)


@cache
def usable(device_type: str) -> bool:
    """Whether kernels can run there: torch for CUDA brings Triton along, but not on every platform."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


@cache
def dependent_launch() -> bool:
    """Whether a kernel may be launched while the one before it still runs (Hopper and later)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = False, **options: Any) -> None:
    """Launch a kernel; with `pdl` while the one before it may still run, for which it waits by itself."""
    if pdl:  # not known to the interpreter
        options["launch_pdl"] = True
    ahead = _ahead.get()
    if ahead is not None:
        ahead.submit(kernel, grid, args, options)
    else:
        kernel[grid](*args, **options)


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Within, launches do not run: their kernels are compiled, side by side, and ready at the end."""
    import torch

    # the device that kernels are loaded onto is each thread's own affair
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)) as pool:
        ahead = CompileAhead(pool)
        token = _ahead.set(ahead)
        try:
            yield
        finally:
            _ahead.reset(token)
        for job in ahead.jobs.values():
            job.result()


class CompileAhead:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.jobs: dict[tuple, Future] = {}
        self._pool = pool

    def submit(self, kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        key = (id(kernel), *map(_kind, args), *sorted((name, _kind(value)) for name, value in options.items()))
        if key not in self.jobs:
            job = self.jobs[key] = self._pool.submit(_prepare, kernel, grid, args, options)
            if len(self.jobs) == 1:
                job.result()  # Triton first reads all of itself for its cache's key: once, and not in every thread


def _prepare(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> Any:
    """Compile a kernel, and by asking for its `run` also the piece of C that launches it."""
    return kernel.warmup(*args, grid=grid, **options).run


def _kind(value: Any) -> str:
    """What a kernel is compiled for: a tensor's type and alignment, a number itself."""
    if hasattr(value, "data_ptr"):
        return f"{value.dtype}{value.data_ptr() % 16 == 0}"
    return repr(value)
