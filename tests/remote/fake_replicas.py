"""Fake engines for the tests of replicas, and waiting with a time limit."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from nanovllm.engine.deltas import Delta
from nanovllm.errors import EngineClosedError, EngineError
from nanovllm.remote.messages import AddRequest, EngineStats, EngineView, Ready
from nanovllm.remote.replicas import Fleet
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 16
STATS = EngineStats(1, 2, 10, 3, 5, 7, 100, 40, 1000, 500)
PATIENCE = 30.0  # seconds allowed for operations that take milliseconds


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.005)


class FakeClient:
    """Sends two words per request, the second when the test allows it; ends when the test wants it."""

    pid = None

    def __init__(self, number: int, max_model_len: int = 100) -> None:
        self.number = number
        self.ready = Ready(max_model_len, 10, BLOCK_SIZE, {})
        self.seen: list[str] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.says_first_word = True
        self.end = asyncio.Event()
        self.ill = False
        self.closed = False
        self.views: asyncio.Queue[EngineView] = asyncio.Queue()
        self.num_resets = 0

    async def _wait(self, event: asyncio.Event) -> None:
        tasks = [asyncio.ensure_future(one.wait()) for one in (event, self.end)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.end.is_set():
            raise EngineClosedError(f"engine {self.number} is gone")

    async def stream(self, request: AddRequest) -> AsyncGenerator[list[Delta], None]:
        name = request.request_id
        self._check_alive()
        self.seen.append(name)
        self.running.add(name)
        try:
            if self.says_first_word:
                yield [Delta(name, 0, "one", [1])]
            await self._wait(self.gate)
            yield [Delta(name, 0, "two", [2], finish_reason="stop")]
        finally:
            self.running.discard(name)

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        await self._wait(self.gate)
        return [float(self.number)]

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def check_health(self) -> None:
        self._check_alive()
        if self.ill:
            raise EngineError("stalled")

    async def stats(self) -> EngineStats:
        self._check_alive()
        return STATS

    async def reset_prefix_cache(self) -> None:
        self._check_alive()
        self.num_resets += 1

    async def view(self) -> AsyncGenerator[EngineView, None]:
        while True:
            view = asyncio.ensure_future(self.views.get())
            end = asyncio.ensure_future(self.end.wait())
            try:
                await asyncio.wait({view, end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                end.cancel()
            self._check_alive()
            yield view.result()

    async def ended(self) -> None:
        await self.end.wait()

    async def close(self) -> None:
        self.closed = True
        self.end.set()


class Yard:
    """Starts fake engines and keeps a list of all of them."""

    def __init__(self) -> None:
        self.built: list[FakeClient] = []
        self.broken = False
        self.num_failures = 0

    async def launch(self, number: int) -> FakeClient:
        await asyncio.sleep(0)
        if self.broken:
            self.num_failures += 1
            raise EngineError("out of order")
        self.built.append(FakeClient(number, max_model_len=100 - number))
        return self.built[-1]

    async def fleet(self, count: int = 2) -> Fleet:
        return await Fleet.start(self.launch, count, block_size=BLOCK_SIZE, max_num_seqs=4, first_wait=0.01)


def request(name: str, *, begins_with: int = 0, salt: str | None = None) -> AddRequest:
    """Prompts that begin with the same number have the same first block."""
    return AddRequest(name, [begins_with] * BLOCK_SIZE + [7], SamplingParams(), 0, salt)


async def all_of(stream: AsyncGenerator[list[Delta], None]) -> str:
    return " ".join([delta.text async for batch in stream for delta in batch])


async def open_stream(fleet: Fleet, asked: AddRequest) -> AsyncGenerator[list[Delta], None]:
    stream = fleet.stream(asked)
    await anext(stream)
    return stream
