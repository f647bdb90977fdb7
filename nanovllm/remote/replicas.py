"""`Replicas`: an `AsyncLLM` that spreads its requests over several engine processes.

A request goes to the replica that has computed most of its prefix, unless that one is much busier than the others (see
routing.py). If a replica ends, its requests without an output yet go to another one, and it is restarted in the
background.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from nanovllm.config import Config
from nanovllm.engine.deltas import Delta
from nanovllm.errors import ConfigError, EngineClosedError, EngineError, NanoError, RequestError
from nanovllm.remote.async_llm import AsyncLLM, Client
from nanovllm.remote.client import EngineClient
from nanovllm.remote.messages import AddRequest, EngineStats, EngineView, Ready, RequestView, StepView
from nanovllm.remote.routing import Router
from nanovllm.remote.views import MAX_STEPS_KEPT, SECONDS_BETWEEN_VIEWS
from nanovllm.runner.device import resolve_device
from nanovllm.utils.hub import resolve_model
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)

MAX_TRIES = 2  # per request: the request itself may be what makes replicas end
FIRST_WAIT = 0.5  # seconds before an engine that ended is restarted; doubled if it soon ends again
LONGEST_WAIT = 60.0
SETTLED_SECONDS = 60.0  # after serving for this long, the next restart waits only FIRST_WAIT again


class Replicas(AsyncLLM):
    """Several engines as one. `start` makes it for the running event loop. Close it, or use it in `async with`."""

    @classmethod
    async def start(
        cls, model: str | Path | None = None, *, count: int = 1, stall_seconds: float = 30.0, **options: Any
    ) -> "Replicas":
        """Load a model in `count` processes at the same time; the options are those of `LLM`.

        On GPUs each replica gets its own devices; on a CPU the threads and the memory are divided among them.
        """
        config = Config.from_options(None if model is None else str(model), options)
        environments = device_environments(config, count)
        path = await asyncio.to_thread(resolve_model, config.model)
        divided = options | {"cpu_memory_utilization": config.cpu_memory_utilization / count}

        def launch(number: int) -> Awaitable[EngineClient]:
            return EngineClient.start(str(path), divided, stall_seconds=stall_seconds, environment=environments[number])

        fleet = Fleet.start(launch, count, block_size=config.kv_cache_block_size, max_num_seqs=config.max_num_seqs)
        engine = await cls._connect(fleet, config, path)
        engine.max_num_seqs *= count
        return engine


def device_environments(config: Config, count: int) -> list[dict[str, str]]:
    """For each of `count` replicas, the environment variables that select its devices."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"replicas={count!r}: must be an integer of at least 1")
    if resolve_device(config.device).type == "cpu":
        return thread_environments(len(os.sched_getaffinity(0)), count)
    if config.distributed_executor_backend == "ray":
        return [{}] * count  # Ray assigns devices to workers
    return gpu_environments(_visible_gpus(), count, config.tensor_parallel_size * config.pipeline_parallel_size)


def gpu_environments(gpus: Sequence[str], count: int, each: int) -> list[dict[str, str]]:
    if len(gpus) < count * each:
        raise ConfigError(
            f"replicas={count}: {count * each} GPUs are needed, {each} for each replica, and there are {len(gpus)}; "
            "ask for fewer replicas, or lower tensor_parallel_size"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[each * n : each * (n + 1)])} for n in range(count)]


def thread_environments(cpus: int, count: int) -> list[dict[str, str]]:
    """Divide the CPUs evenly. If the user has set OMP_NUM_THREADS, each replica uses that many threads."""
    num_threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpus // count))
    return [{"OMP_NUM_THREADS": num_threads}] * count


def _visible_gpus() -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = torch.cuda.device_count()
    return [str(number) for number in range(found)] if names is None else names.split(",")[:found]


# --- the engines ------------------------------------------------------------------------------------------------------


class ReplicaClient(Client, Protocol):
    """An `EngineClient`, or a fake one in tests."""

    async def ended(self) -> None: ...


Launch = Callable[[int], Awaitable[ReplicaClient]]


@dataclass(eq=False)
class Replica:
    """One engine, until it ends; its successor has the same number."""

    number: int
    client: ReplicaClient
    stats: EngineStats | None = None  # as of the last `Fleet.stats`


class Fleet:
    """Sends requests to several engines and restarts those that end. `start` makes it for the running event loop."""

    pid = None  # there are several

    def __init__(
        self, clients: Sequence[ReplicaClient], launch: Launch, *, block_size: int, max_num_seqs: int, first_wait: float
    ) -> None:
        self.ready: Ready = min((client.ready for client in clients), key=lambda ready: ready.max_model_len)
        self._launch = launch
        self._first_wait = first_wait
        self._max_num_seqs = max_num_seqs
        self._serving: dict[int, Replica] = {}
        self._router = Router(block_size=block_size)
        self._homes: dict[str, Replica] = {}  # the replica of each running request
        self._past = EngineStats(*[0] * len(EngineStats.__struct_fields__))  # counts of engines that have ended
        self._viewers: set[Viewer] = set()
        self._open = set(clients)
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._keepers = [asyncio.ensure_future(self._keep(self._join(*item))) for item in enumerate(clients)]

    @classmethod
    async def start(
        cls, launch: Launch, count: int, *, block_size: int, max_num_seqs: int, first_wait: float = FIRST_WAIT
    ) -> "Fleet":
        """Start `count` engines at the same time. If one fails to start, all are closed and its error is raised."""
        starting = [asyncio.ensure_future(launch(number)) for number in range(count)]
        try:
            clients = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    await outcome.close()
            raise
        return cls(clients, launch, block_size=block_size, max_num_seqs=max_num_seqs, first_wait=first_wait)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def stream(self, request: AddRequest) -> AsyncGenerator[list[Delta], None]:
        """As `EngineClient.stream`. If the replica ends before its first output, the request goes to another one."""
        name = request.request_id
        if name in self._homes:
            raise RequestError(f"request_id={name!r}: a request of this name is still running")
        begun = False
        for last_try in tries():
            replica = self._homes[name] = self._route(request.token_ids, request.cache_salt)
            try:
                async with aclosing(replica.client.stream(request)) as batches:
                    async for batch in batches:
                        begun = True
                        yield batch
                return
            except EngineClosedError:
                self._leave(replica)
                if begun or last_try:
                    raise
            finally:
                del self._homes[name]
                self._router.finished(replica)

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        for last_try in tries():
            replica = self._route((), None)  # by load alone
            try:
                return await replica.client.embed(token_ids, pooling)
            except EngineClosedError:
                self._leave(replica)
                if last_try:
                    raise
            finally:
                self._router.finished(replica)
        raise AssertionError("the last try returns or raises")

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: their completions finish with the reason "abort". Unknown ones are ignored."""
        for name in request_ids:
            if name in self._homes:
                self._homes[name].client.abort([name])

    def _route(self, token_ids: Sequence[int], salt: str | None) -> Replica:
        self._check_alive()
        replica = self._router.route(token_ids, salt=salt)
        assert isinstance(replica, Replica)
        return replica

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that take requests now."""
        return [self._serving[number] for number in sorted(self._serving)]

    def check_health(self) -> None:
        """Raise EngineError if no replica is healthy. If some are, the unhealthy ones are closed and restarted."""
        self._check_alive()
        unhealthy: dict[Replica, EngineError] = {}
        for replica in self.replicas:
            try:
                replica.client.check_health()
            except EngineError as error:
                unhealthy[replica] = error
        if len(unhealthy) == len(self._serving):
            raise next(iter(unhealthy.values()))
        for replica, reason in unhealthy.items():
            self._give_up(replica, reason)

    async def stats(self) -> EngineStats:
        """The sum over all replicas, with the counts of those that have ended."""
        await self._ask_all(self._refresh)
        return total([self._past, *(replica.stats for replica in self.replicas if replica.stats is not None)])

    async def _refresh(self, replica: Replica) -> None:
        replica.stats = await replica.client.stats()

    async def reset_prefix_cache(self) -> None:
        await self._ask_all(lambda replica: replica.client.reset_prefix_cache())

    async def _ask_all(self, question: Callable[[Replica], Awaitable[None]]) -> None:
        """Ask all replicas. One that ends meanwhile is ignored: its successor starts from zero."""
        self._check_alive()

        async def ask(replica: Replica) -> None:
            with suppress(EngineClosedError):
                await question(replica)

        await asyncio.gather(*map(ask, self.replicas))
        self._check_alive()

    async def view(self) -> AsyncGenerator[EngineView, None]:
        """Snapshots of all replicas together, several per second while they work."""
        self._check_alive()
        viewer = Viewer(owners_each=self._max_num_seqs + 1)
        self._viewers.add(viewer)
        for replica in self.replicas:
            viewer.watch(replica)
        try:
            while True:
                yield await viewer.take()
                await asyncio.sleep(SECONDS_BETWEEN_VIEWS)
        finally:
            self._viewers.discard(viewer)
            await viewer.close()

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed")
        if not self._serving:
            raise EngineClosedError("no replica is running; they are being restarted")

    # --- start and end of replicas ------------------------------------------------------------------------------------

    def _join(self, number: int, client: ReplicaClient) -> Replica:
        replica = self._serving[number] = Replica(number, client)
        self._router.add(replica)
        for viewer in self._viewers:
            viewer.watch(replica)
        return replica

    def _leave(self, replica: Replica) -> None:
        """Send no more requests to this replica. May be called again."""
        if self._serving.get(replica.number) is not replica:
            return
        del self._serving[replica.number]
        self._router.remove(replica)
        if replica.stats is not None:
            self._past = total([self._past, counts_only(replica.stats)])

    def _give_up(self, replica: Replica, reason: EngineError) -> None:
        """Close an engine that runs but does not work."""
        logger.warning("replica %d is unhealthy and will be restarted: %s", replica.number, reason)
        self._leave(replica)
        closing = asyncio.ensure_future(replica.client.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _keep(self, replica: Replica) -> None:
        """Restart a replica's engine whenever it ends."""
        wait = self._first_wait
        while True:
            began = time.monotonic()
            await replica.client.ended()
            self._leave(replica)
            logger.warning("replica %d has ended; %d are still running", replica.number, len(self._serving))
            await replica.client.close()
            self._open.discard(replica.client)
            if time.monotonic() - began > SETTLED_SECONDS:
                wait = self._first_wait
            client, wait = await self._restart(replica.number, wait)
            logger.warning("replica %d is running again", replica.number)
            replica = self._join(replica.number, client)

    async def _restart(self, number: int, wait: float) -> tuple[ReplicaClient, float]:
        """Start a new engine; returns its client, and how long to wait before the next restart."""
        while True:
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
            try:
                client = await self._launch(number)
            except Exception as error:
                logger.warning("replica %d could not be started; next try in %.1f s: %s", number, wait, error)
            else:
                self._open.add(client)
                return client, wait

    async def close(self) -> None:
        """End all engines. Iterators of running requests raise EngineClosedError. Closing twice is allowed."""
        self._closed = True
        await _cancel(self._keepers)
        for viewer in self._viewers:
            viewer.fail(EngineClosedError("the engine was closed"))
        await asyncio.gather(*[client.close() for client in self._open])


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def tries() -> Iterator[bool]:
    """For each try of a request, whether it is the last."""
    return (number == MAX_TRIES for number in range(1, MAX_TRIES + 1))


# --- several as one ---------------------------------------------------------------------------------------------------


def total(parts: Iterable[EngineStats]) -> EngineStats:
    return EngineStats(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


def counts_only(stats: EngineStats) -> EngineStats:
    """The stats without what describes the present: the counts that remain when the engine ends."""
    return msgspec.structs.replace(
        stats, num_running=0, num_waiting=0, num_blocks=0, num_free_blocks=0, num_cached_blocks=0
    )


class Viewer:
    """For one caller of `Fleet.view`: the newest view of each replica, and the steps since the last one taken."""

    def __init__(self, owners_each: int) -> None:
        self._owners_each = owners_each
        self._views: dict[Replica, EngineView] = {}
        self._steps: list[StepView] = []
        self._news = asyncio.Event()
        self._error: NanoError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, replica: Replica) -> None:
        task = asyncio.ensure_future(self._follow(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, replica: Replica) -> None:
        try:
            with suppress(EngineClosedError):  # its successor will be watched
                async with aclosing(replica.client.view()) as views:
                    async for view in views:
                        self._views[replica] = view
                        self._steps = (self._steps + view.steps)[-MAX_STEPS_KEPT:]
                        self._news.set()
        finally:
            self._views.pop(replica, None)
            self._news.set()

    def fail(self, error: NanoError) -> None:
        self._error = error
        self._news.set()

    async def take(self) -> EngineView:
        while self._error is None:
            await self._news.wait()
            self._news.clear()
            if self._views:
                steps, self._steps = self._steps, []
                views = sorted(self._views.items(), key=lambda item: item[0].number)
                return combined_view([view for _, view in views], steps, self._owners_each)
        raise self._error

    async def close(self) -> None:
        await _cancel(self._tasks)


def combined_view(views: Sequence[EngineView], steps: list[StepView], owners_each: int) -> EngineView:
    """One view of several engines: the blocks and requests of one engine after those of another.

    Owners are renumbered: those of each engine start at a multiple of `owners_each`, so that all numbers differ.
    """
    running: list[RequestView] = []
    owners: list[int] = []
    for number, view in enumerate(views):
        renumber = partial(_renumber, first=number * owners_each)
        owners += map(renumber, view.owners)
        running += [msgspec.structs.replace(request, owner=renumber(request.owner)) for request in view.running]
    return EngineView(
        stats=total(view.stats for view in views),
        blocks=b"".join(view.blocks for view in views),
        owners=owners,
        running=running,
        waiting=[request for view in views for request in view.waiting],
        steps=steps,
    )


def _renumber(owner: int, *, first: int) -> int:
    return first + owner if owner else 0  # 0 means that no sequence uses the block
