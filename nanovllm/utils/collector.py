"""Makes Python's garbage collector run less often.

A process has one collector, whose settings all threads and engines share. Within a `with` block the settings change for
its duration only. Engines that run at the same time affect each other's speed here, never their results.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 100_000  # new objects before a collection; the default of about 2,000 makes steps longer


@contextmanager
def collector_paused() -> Iterator[None]:
    """Turn the collector off. For imports and kernel compilation, whose objects nearly all stay alive."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # this and the next line make all objects old, so that the next collection does not scan them
            gc.unfreeze()
            gc.enable()


@contextmanager
def collector_calmed() -> Iterator[None]:
    """Collect less often. With thousands of requests every few milliseconds would go into scans that free nothing."""
    before = gc.get_threshold()
    raises = 0 < before[0] < YOUNG_OBJECTS  # 0 means off; a high value was set by another thread, which restores it
    if raises:
        gc.set_threshold(YOUNG_OBJECTS)
    try:
        yield
    finally:
        if raises:
            gc.set_threshold(*before)
