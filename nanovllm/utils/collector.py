"""Python's garbage collector, kept out of the way."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 100_000  # that may come before the collector looks at them: it would lengthen steps


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


@contextmanager
def collector_calmed() -> Iterator[None]:
    """While thousands of requests are taken in and answered: the collector would look through their tokens every few
    milliseconds, and they are no garbage."""
    before = gc.get_threshold()
    calms = 0 < before[0] < YOUNG_OBJECTS  # 0: it never looks; many: another thread is within, and will undo it
    if calms:
        gc.set_threshold(YOUNG_OBJECTS)
    try:
        yield
    finally:
        if calms:
            gc.set_threshold(*before)


def calm_collector() -> None:
    """For good, in a process of our own, once all is loaded: what is there now stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
