"""Several engines behind one door: `Replicas`, an `AsyncLLM` that spreads its requests over engine processes.

A request goes to the replica that holds most of its beginning, unless that one is much busier than the others (see
routing.py). A replica that ends leaves at once; what it had not begun to answer goes to another, and it is started
anew in the background and joins again.
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

MAX_TRIES = 2  # of one request: perhaps it is what ends the replicas
FIRST_WAIT = 0.5  # seconds before an engine that ended is started anew; doubled each time that does not last
LONGEST_WAIT = 60.0
SETTLED_SECONDS = 60.0  # an engine that has served for so long did not end because of how it was started


class Replicas(AsyncLLM):
    """Made by `start`; belongs to the event loop it was started in. Close it, or use it in `async with`."""

    @classmethod
    async def start(
        cls, model: str | Path | None = None, *, count: int = 1, stall_seconds: float = 30.0, **options: Any
    ) -> "Replicas":
        """Load a model `count` times side by side, with the options that `LLM` takes.

        On GPUs each replica has devices of its own; on a CPU they share its threads and memory.
        """
        config = Config.from_options(None if model is None else str(model), options)
        environments = share_devices(config, count)
        path = await asyncio.to_thread(resolve_model, config.model)
        shared = options | {"cpu_memory_utilization": config.cpu_memory_utilization / count}

        def launch(number: int) -> Awaitable[EngineClient]:
            return EngineClient.start(str(path), shared, stall_seconds=stall_seconds, environment=environments[number])

        fleet = Fleet.start(launch, count, block_size=config.kv_cache_block_size, max_num_seqs=config.max_num_seqs)
        engine = await cls._over(fleet, config, path)
        engine.max_num_seqs *= count
        return engine


def share_devices(config: Config, count: int) -> list[dict[str, str]]:
    """For each of `count` replicas, what its environment says of the devices it may use."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"replicas={count!r}: must be an integer of at least 1")
    if resolve_device(config.device).type == "cpu":
        return share_threads(len(os.sched_getaffinity(0)), count)
    if config.distributed_executor_backend == "ray":
        return [{}] * count  # Ray gives each worker its devices
    return share_gpus(_visible_gpus(), count, config.tensor_parallel_size * config.pipeline_parallel_size)


def share_gpus(gpus: Sequence[str], count: int, each: int) -> list[dict[str, str]]:
    if len(gpus) < count * each:
        raise ConfigError(
            f"replicas={count}: {count * each} GPUs are needed, {each} for each replica, and there are {len(gpus)}; "
            "ask for fewer replicas, or lower tensor_parallel_size"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[each * n : each * (n + 1)])} for n in range(count)]


def share_threads(cpus: int, count: int) -> list[dict[str, str]]:
    """A number of threads that the user has set holds for each replica."""
    share = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpus // count))
    return [{"OMP_NUM_THREADS": share}] * count


def _visible_gpus() -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = torch.cuda.device_count()
    return [str(number) for number in range(found)] if names is None else names.split(",")[:found]


# --- the engines ------------------------------------------------------------------------------------------------------


class ReplicaClient(Client, Protocol):
    """`EngineClient`, and the fakes of the tests."""

    async def ended(self) -> None: ...


Launch = Callable[[int], Awaitable[ReplicaClient]]


@dataclass(eq=False)
class Replica:
    """One life of an engine."""

    number: int  # of its seat, which its successor takes over
    client: ReplicaClient
    stats: EngineStats | None = None  # when last asked


class Fleet:
    """The way to several engines, which it keeps alive. Made by `start`; belongs to the event loop of that moment."""

    pid = None  # there is more than one

    def __init__(
        self, clients: Sequence[ReplicaClient], launch: Launch, *, block_size: int, max_num_seqs: int, first_wait: float
    ) -> None:
        self.ready: Ready = min((client.ready for client in clients), key=lambda ready: ready.max_model_len)
        self._launch = launch
        self._first_wait = first_wait
        self._max_num_seqs = max_num_seqs
        self._serving: dict[int, Replica] = {}
        self._router = Router(block_size=block_size)
        self._homes: dict[str, Replica] = {}  # running requests
        self._past = EngineStats(*[0] * len(EngineStats.__struct_fields__))  # what ended engines have done
        self._viewers: set[Viewer] = set()
        self._open = set(clients)
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._keepers = [asyncio.ensure_future(self._keep(self._join(*seat))) for seat in enumerate(clients)]

    @classmethod
    async def start(
        cls, launch: Launch, count: int, *, block_size: int, max_num_seqs: int, first_wait: float = FIRST_WAIT
    ) -> "Fleet":
        """All at the same time; if one cannot be started, none is left running and its error is raised."""
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
        """As `EngineClient.stream`; if the replica ends before it has said anything, another one is asked."""
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
            replica = self._route((), None)  # an embedding finds nothing in the prefix cache and leaves nothing there
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
        """End requests; their completions finish with the reason "abort". Others are passed over."""
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
        """Those that serve."""
        return [self._serving[number] for number in sorted(self._serving)]

    def check_health(self) -> None:
        """EngineError unless at least one replica is well. Those that are not, while another is, are given up."""
        self._check_alive()
        ill: dict[Replica, EngineError] = {}
        for replica in self.replicas:
            try:
                replica.client.check_health()
            except EngineError as error:
                ill[replica] = error
        if len(ill) == len(self._serving):
            raise next(iter(ill.values()))
        for replica, reason in ill.items():
            self._give_up(replica, reason)

    async def stats(self) -> EngineStats:
        """Of all replicas together, and what those did that have ended since."""
        await self._ask_all(self._refresh)
        return total([self._past, *(replica.stats for replica in self.replicas if replica.stats is not None)])

    async def _refresh(self, replica: Replica) -> None:
        replica.stats = await replica.client.stats()

    async def reset_prefix_cache(self) -> None:
        await self._ask_all(lambda replica: replica.client.reset_prefix_cache())

    async def _ask_all(self, question: Callable[[Replica], Awaitable[None]]) -> None:
        """One that ends meanwhile is passed over: its successor begins with nothing."""
        self._check_alive()

        async def ask(replica: Replica) -> None:
            with suppress(EngineClosedError):
                await question(replica)

        await asyncio.gather(*map(ask, self.replicas))
        self._check_alive()

    async def view(self) -> AsyncGenerator[EngineView, None]:
        """All replicas side by side in one picture, several times a second while they work."""
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
            raise EngineClosedError("no replica is left; they are being started anew")

    # --- coming and going ---------------------------------------------------------------------------------------------

    def _join(self, number: int, client: ReplicaClient) -> Replica:
        replica = self._serving[number] = Replica(number, client)
        self._router.add(replica)
        for viewer in self._viewers:
            viewer.watch(replica)
        return replica

    def _leave(self, replica: Replica) -> None:
        """No more requests for this one. Harmless for one that has left."""
        if self._serving.get(replica.number) is not replica:
            return
        del self._serving[replica.number]
        self._router.remove(replica)
        if replica.stats is not None:
            self._past = total([self._past, what_it_did(replica.stats)])

    def _give_up(self, replica: Replica, reason: EngineError) -> None:
        """End an engine that is there but does not work."""
        logger.warning("replica %d is given up: %s", replica.number, reason)
        self._leave(replica)
        closing = asyncio.ensure_future(replica.client.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _keep(self, replica: Replica) -> None:
        """Put a new engine into the seat of each that ends."""
        wait = self._first_wait
        while True:
            began = time.monotonic()
            await replica.client.ended()
            self._leave(replica)
            logger.warning("replica %d has ended; %d go on", replica.number, len(self._serving))
            await replica.client.close()
            self._open.discard(replica.client)
            if time.monotonic() - began > SETTLED_SECONDS:
                wait = self._first_wait
            client, wait = await self._start_anew(replica.number, wait)
            logger.warning("replica %d serves again", replica.number)
            replica = self._join(replica.number, client)

    async def _start_anew(self, number: int, wait: float) -> tuple[ReplicaClient, float]:
        """A new engine, and how long to wait if it does not last."""
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
        """End all engines. Requests still running raise EngineClosedError. Closing twice is fine."""
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
    """For each try, whether it is the last."""
    return (number == MAX_TRIES for number in range(1, MAX_TRIES + 1))


# --- many as one ------------------------------------------------------------------------------------------------------


def total(parts: Iterable[EngineStats]) -> EngineStats:
    return EngineStats(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


def what_it_did(stats: EngineStats) -> EngineStats:
    """The counts that outlive an engine."""
    return msgspec.structs.replace(
        stats, num_running=0, num_waiting=0, num_blocks=0, num_free_blocks=0, num_cached_blocks=0
    )


class Viewer:
    """Who looks at all replicas: the newest view of each, and the steps since the last look."""

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
            with suppress(EngineClosedError):  # then another takes its place in the picture
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
                return side_by_side([view for _, view in views], steps, self._owners_each)
        raise self._error

    async def close(self) -> None:
        await _cancel(self._tasks)


def side_by_side(views: Sequence[EngineView], steps: list[StepView], owners_each: int) -> EngineView:
    """One picture of several engines: blocks and requests one engine after the other.

    Owners are numbered anew, each engine's from a multiple of `owners_each`, so that no two share a number.
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
    return first + owner if owner else 0  # 0 is nobody
