"""Triton kernels, one operation a file: its plain torch reference, the kernel, and what launches it."""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

_ahead: ContextVar["CompileAhead | None"] = ContextVar("compile_ahead", default=None)
_preparing = threading.Lock()


@cache
def usable(device_type: str) -> bool:
    """Whether kernels can run there: torch for CUDA brings Triton along, but not on every platform."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


@cache
def dependent_launch() -> bool:
    """Whether a kernel may be launched while the one before it still runs (Hopper and later)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@cache
def gluon_usable() -> bool:
    """Whether kernels in Gluon run here. They are written for Hopper; their language is not settled yet, and these are
    the versions of Triton that compile them."""
    import torch
    import triton

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    return (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = False, **options: Any) -> None:
    """Launch a kernel; with `pdl` while the one before it may still run, for which it waits by itself."""
    if pdl:  # not known to the interpreter
        options["launch_pdl"] = True
    ahead = _ahead.get()
    if ahead is not None:
        ahead.submit(kernel, grid, args, options)
    else:
        kernel[grid](*args, **options)


def cdiv(n: int, size: int) -> int:
    """How many of a size hold n. Triton's own takes 4 us, as kernels can call it too; every launch asks such things."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


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
def compile_ahead(launches: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Compile the kernels that `launches` would launch, side by side and beside what is done within, before whose end
    the function that this gives must be called: it waits for them."""
    import torch

    # the device that kernels are loaded onto is each thread's own affair
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)) as pool:
        ahead = CompileAhead(pool)
        token = _ahead.set(ahead)
        try:
            launches()
        finally:
            _ahead.reset(token)
        try:
            yield ahead.wait
        finally:
            pool.shutdown(cancel_futures=True)


class CompileAhead:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._jobs: dict[tuple, Future] = {}
        self._pool = pool

    def submit(self, kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        key = (id(kernel), *map(_kind, args), *sorted((name, _kind(value)) for name, value in options.items()))
        if key not in self._jobs:
            self._jobs[key] = self._pool.submit(_prepare, kernel, grid, args, options)

    def wait(self) -> None:
        for job in self._jobs.values():
            job.result()


def _prepare(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> Any:
    """Compile a kernel, and by asking for its `run` also the piece of C that launches it."""
    prepare_triton()
    return kernel.warmup(*args, grid=grid, **options).run


def _kind(value: Any) -> str:
    """What a kernel is compiled for: a tensor's type and alignment, a descriptor's block, a number itself."""
    if hasattr(value, "data_ptr"):
        return f"{value.dtype}{value.data_ptr() % 16 == 0}"
    if hasattr(value, "block_shape"):  # a descriptor, of what lies where TMA can read it
        return f"{value.base.dtype}{value.block_shape}{value.layout}"
    return repr(value)
