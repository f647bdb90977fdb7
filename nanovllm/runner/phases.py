"""Measures how long each part of the start takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Collects the seconds of named phases; on a GPU a phase ends when its queued work has run."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name] = time.perf_counter() - begin
