"""Python's garbage collector, kept out of the way of a start."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """While modules are imported and kernels compiled nearly all that is made stays: looking through it is in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
