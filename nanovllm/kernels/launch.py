"""Triton kernels, one operation a file: its plain torch reference, the kernel, and what launches it."""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

_collect: ContextVar[Callable[..., object] | None] = ContextVar("collect", default=None)
_compiled: dict[tuple, tuple[Any, list[str]]] = {}  # by kind of launch, with the names of what is constant in it

# Held by who has Triton load a kernel. The pieces of C that launch kernels are Python modules of one name, and Python,
# asked for such a one again, gives out the module of that name that was loaded last, its functions exchanged. A thread
# that has just been given its module may so find another kernel's launcher in it.
loading = threading.Lock()


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
    """Launch a kernel; with `pdl` while the one before it may still run, for which it waits by itself.

    What is constant in the kernel is given by name.
    """
    if pdl:  # not known to the interpreter
        options["launch_pdl"] = True
    if (collect := _collect.get()) is not None:
        collect(kernel, grid, args, options)
    elif hasattr(kernel, "device_caches"):
        _launch_remembered(kernel, grid, args, options)
    else:  # of the interpreter
        kernel[grid](*args, **options)


def _launch_remembered(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
    """Find what was compiled for such arguments, by what Triton tells them apart by: its own way takes 12 us more."""
    import torch

    kinds, plain = described(args)
    kind = id(kernel), torch.cuda.current_device(), *options.items(), *kinds
    found = _compiled.get(kind)
    if found is None:
        with loading:
            _compiled[kind] = kernel[grid](*args, **options), kernel.arg_names[len(args) :]
        return
    compiled, names = found
    compiled[(*grid, 1, 1)[:3]](*plain, *[options[name] for name in names])


def described(args: tuple) -> tuple[list[Any], list[Any]]:
    """What Triton compiles a kernel for, of arguments that are not constant in it, and the arguments as it takes them
    fastest. One pass: every launch makes it."""
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
        elif hasattr(arg, "block_shape"):  # a descriptor, of a tensor that lies where TMA can read it
            kinds.append((arg.base.dtype, *arg.block_shape, arg.layout))
        else:
            kinds.append(type(arg))
        plain.append(arg)
    return kinds, plain


@contextmanager
def collecting(collect: Callable[..., object]) -> Iterator[None]:
    """Within, what is launched is handed over instead: kernel, grid, arguments and options."""
    token = _collect.set(collect)
    try:
        yield
    finally:
        _collect.reset(token)


def cdiv(n: int, size: int) -> int:
    """How many of a size hold n. Triton's own takes 4 us, as kernels can call it too; every launch asks such things."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
