"""How long the parts of a start take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
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
