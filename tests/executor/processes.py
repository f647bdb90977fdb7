"""Helpers that ask for the state of processes."""

import time
from collections.abc import Callable, Iterable

import psutil

SECONDS = 10.0  # generous, because test machines are busy; the promise is "within seconds"


def is_gone(pid: int) -> bool:
    """True if the process has ended, also as a zombie whose parent has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def all_gone(pids: Iterable[int]) -> bool:
    pids = list(pids)
    return until(lambda: all(map(is_gone, pids)))


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]
