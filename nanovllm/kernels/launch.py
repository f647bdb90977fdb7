"""Launch Triton kernels with little overhead, and ask what the device supports.

Each file under kernels/ holds one operation: its plain torch reference, the kernel, and the function that launches it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Seen only by the thread that sets it: `record_launches` does for the calls within a `with` block.
_recorder: ContextVar[Callable[..., object] | None] = ContextVar("recorder", default=None)

# Compiled kernels by kernel, device, options and argument kinds, each with the names of its constexpr parameters. A
# cache of immutable values: engines in one process may share it.
_compiled: dict[tuple, tuple[Any, list[str]]] = {}

# Held while Triton loads a kernel's launcher. Triton compiles launchers to C extension modules that all have the same
# name, and when two threads import them at the same time, CPython may give one thread the other's functions. The name
# is shared by the whole process, so the lock is too.
loading_lock = threading.Lock()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = False, **options: Any) -> None:
    """Launch a kernel on a grid. Constexpr parameters and Triton's options are keywords, other arguments positional.

    With `pdl` (programmatic dependent launch) the kernel may start before its predecessor in the stream has ended; it
    must then wait by itself, with gdc_wait, before it reads what the predecessor wrote.
    """
    if pdl:  # set only if needed: the interpreter rejects the option
        options["launch_pdl"] = True
    if (record := _recorder.get()) is not None:
        record(kernel, grid, args, options)
    elif hasattr(kernel, "device_caches"):
        _launch_cached(kernel, grid, args, options)
    else:  # Triton's interpreter
        kernel[grid](*args, **options)


def _launch_cached(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
    """Launch with our own lookup of the compiled kernel, which takes 12 us less than Triton's."""
    import torch

    kinds, plain = argument_kinds(args)
    key = id(kernel), torch.cuda.current_device(), *options.items(), *kinds
    found = _compiled.get(key)
    if found is None:
        with loading_lock:
            _compiled[key] = kernel[grid](*args, **options), kernel.arg_names[len(args) :]
        return
    compiled, names = found
    compiled[(*grid, 1, 1)[:3]](*plain, *[options[name] for name in names])


def argument_kinds(args: tuple) -> tuple[list[Any], list[Any]]:
    """What Triton specializes a kernel on (types, alignment, small integers), and the arguments in the form that its
    launcher takes fastest. One pass for both, because every launch calls this."""
    kinds: list[Any] = []
    plain: list[Any] = []
    for arg in args:
        if type(arg) is int:
            kinds.append((arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31))
        elif (address_of := getattr(arg, "data_ptr", None)) is not None:
            address = address_of()
            kinds.append(arg.dtype)
            kinds.append(address % 16 == 0)
            arg = address
        elif hasattr(arg, "block_shape"):  # a TMA descriptor, whose tensor is always aligned
            kinds.append((arg.base.dtype, *arg.block_shape, arg.layout))
        else:
            kinds.append(type(arg))
        plain.append(arg)
    return kinds, plain


@contextmanager
def record_launches(record: Callable[..., object]) -> Iterator[None]:
    """In the body, call `record(kernel, grid, args, options)` for every launch instead of launching."""
    token = _recorder.set(record)
    try:
        yield
    finally:
        _recorder.reset(token)


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up. triton.cdiv takes 4 us per call, because kernels can call it too."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
