"""The client of an engine that runs in a child process or a thread: streams of deltas, answers, and its health."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from itertools import count
from typing import Any

import msgspec

from nanovllm.engine.deltas import Delta
from nanovllm.errors import EngineClosedError, EngineError, RequestError
from nanovllm.remote.hosts import Host, ProcessHost, ThreadHost
from nanovllm.remote.messages import (
    Abort,
    Aborted,
    AddRequest,
    Answer,
    Command,
    Embed,
    EngineStats,
    EngineView,
    Event,
    Failed,
    GetStats,
    Ping,
    Pong,
    Ready,
    Refused,
    ResetPrefixCache,
    Shutdown,
    Start,
    StepDone,
    View,
    Watch,
)
from nanovllm.remote.streams import DeltaStream, ViewStream
from nanovllm.remote.transport import Transport, raised_elsewhere, to_frame

SECONDS_TO_STOP = 5.0  # from the shutdown command until the engine is killed
SECONDS_TO_EXIT = 0.5  # from the end of a process's socket until its exit status must be there


class Connection:
    """The client's end of the socket in an event loop: calls `on_event` for each event of the engine, and `on_end`
    once the engine has closed its end or `close` was called."""

    def __init__(self, sock: socket.socket, on_event: Callable[[Event], None], on_end: Callable[[], None]) -> None:
        self._on_event = on_event
        self._on_end = on_end
        self._transport = Transport(sock)
        self._decoder = msgspec.msgpack.Decoder(Event)
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._transport, self._read)

    def send(self, command: Command) -> None:
        if self._open:
            self._transport.send(to_frame(command))
            if self._transport.unsent:
                self._loop.add_writer(self._transport, self._write)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._transport)
            self._loop.remove_writer(self._transport)
            self._transport.close()
            self._on_end()

    def _write(self) -> None:
        self._transport.send_unsent()
        if not self._transport.unsent:
            self._loop.remove_writer(self._transport)

    def _read(self) -> None:
        try:
            for frame in self._transport.receive():
                self._on_event(self._decoder.decode(frame))
        except EOFError:
            self.close()
        except BaseException:
            self.close()
            raise


class EngineClient:
    """`start` makes one for the running event loop."""

    ready: Ready

    def __init__(self, host: Host, stall_seconds: float) -> None:
        self._host = host
        self._stall_seconds = stall_seconds
        self._connection: Connection
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, DeltaStream] = {}  # unfinished requests
        self._leaving: Counter[str] = Counter()  # aborted here, but the engine has not confirmed it yet
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._call_numbers = count()
        self._pinged = False
        self._viewers: set[ViewStream] = set()
        self._last_progress = time.monotonic()  # time of the engine's last event, or when it was last idle
        self._death: tuple[str, str | None] | None = None  # why the engine has ended, and its traceback
        self._disconnected = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        model: str | None,
        options: dict[str, Any],
        *,
        in_process: bool = False,
        stall_seconds: float = 30.0,
        environment: Mapping[str, str] | None = None,
    ) -> "EngineClient":
        """Start an engine and wait until the model is loaded. Raises the engine's error if that fails."""
        ours, theirs = socket.socketpair()
        client = cls(ThreadHost(theirs) if in_process else ProcessHost(theirs, environment or {}), stall_seconds)
        client._connection = Connection(ours, client._on_event, client._on_end)
        client._connection.send(Start(model, options))
        try:
            client.ready = await client._started
        except BaseException:
            client._host.kill()
            client._connection.close()
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None if it runs in a thread of this one."""
        return self._host.pid

    # --- requests -----------------------------------------------------------------------------------------------------

    async def stream(self, request: AddRequest) -> AsyncGenerator[list[Delta], None]:
        """Send a request and yield its deltas in batches, at most one per completion in each, until all have finished.

        Leaving early, by `aclose` or by cancellation, aborts the request.
        """
        self._check_alive()
        name = request.request_id
        if name in self._streams:
            raise RequestError(f"request_id={name!r}: a request of this name is still running")
        self._note_if_idle()
        stream = self._streams[name] = DeltaStream(request.params.n)
        self._connection.send(request)
        try:
            while batch := await stream.take():
                yield batch
        finally:
            if self._streams.get(name) is stream:
                self._abort([name])

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: their completions finish with the reason "abort". Unknown ones are ignored."""
        names = [name for name in request_ids if name in self._streams]
        streams = [self._streams[name] for name in names]
        self._abort(names)
        for name, stream in zip(names, streams, strict=True):
            stream.abort(name)

    def _abort(self, names: list[str]) -> None:
        for name in names:
            del self._streams[name]
        if names and self._death is None:
            self._leaving.update(names)
            self._connection.send(Abort(names))

    # --- questions ----------------------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        answer = await self._ask(GetStats)
        assert answer.stats is not None
        return answer.stats

    async def reset_prefix_cache(self) -> None:
        await self._ask(ResetPrefixCache)

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        answer = await self._ask(Embed, token_ids, pooling)
        assert answer.embedding is not None
        return answer.embedding

    async def view(self) -> AsyncGenerator[EngineView, None]:
        """Snapshots of the engine, several per second while it works; it makes none while nobody iterates."""
        self._check_alive()
        viewer = ViewStream()
        self._viewers.add(viewer)
        self._connection.send(Watch(on=True))
        try:
            while True:
                yield await viewer.take()
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._connection.send(Watch(on=False))

    def check_health(self) -> None:
        """Raise EngineError unless the engine is idle or has sent an event within `stall_seconds`.

        An idle engine is sent a `Ping`; if it does not answer, a later check raises.
        """
        self._check_alive()
        if not self._owes_answers:
            self._note_if_idle()
            self._pinged = True
            self._connection.send(Ping())
        silent = time.monotonic() - self._last_progress
        if silent > self._stall_seconds:
            raise EngineError(f"the engine is stalled: it has work, but no step has finished for {silent:.0f} s")

    async def _ask(self, command: Callable[..., Command], *details: Any) -> Answer:
        self._check_alive()
        self._note_if_idle()
        number = next(self._call_numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._connection.send(command(number, *details))
        found = await answer
        if found.refusal is not None:
            raise RequestError(found.refusal)
        return found

    # --- events of the engine -----------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if self._death is not None:
            return  # all waiters have got the error already
        self._last_progress = time.monotonic()
        match event:
            case StepDone(deltas):
                for delta in deltas:
                    self._hand_on(delta)
            case Refused(name, message):
                if name not in self._leaving and name in self._streams:
                    self._streams.pop(name).fail(RequestError(message))
            case Aborted(names):
                self._leaving -= Counter(names)
            case Answer(call):
                answer = self._calls.pop(call)
                if not answer.done():  # else the caller was cancelled
                    answer.set_result(event)
            case View(view):
                for viewer in self._viewers:
                    viewer.put(view)
            case Pong():
                self._pinged = False
            case Ready():
                self._started.set_result(event)
            case Failed():
                self._on_failed(event)

    def _hand_on(self, delta: Delta) -> None:
        name = delta.request_id
        stream = self._streams.get(name)
        if stream is None or name in self._leaving:
            return  # of an aborted request; a new one may have the same name
        stream.put(delta)
        if stream.finished:
            del self._streams[name]

    def _on_failed(self, event: Failed) -> None:
        if self._started.done():
            self._die(f"the engine has failed: {event.message}", event.traceback)
        else:
            self._started.set_exception(
                raised_elsewhere(event.kind, event.message, event.traceback, where="the engine")
            )

    def _on_end(self) -> None:
        self._disconnected.set()
        if self._death is None:
            self._run(self._find_out_why())

    async def _find_out_why(self) -> None:
        end = await asyncio.to_thread(self._host.wait, SECONDS_TO_EXIT)
        self._die(f"the engine is gone: {end or 'it closed its socket'}")

    def _die(self, reason: str, traceback: str | None = None) -> None:
        """Note the engine's end and raise it in everything that waits."""
        if self._death is not None:
            return
        self._death = (reason, traceback)
        streams: list[DeltaStream | ViewStream] = [*self._streams.values(), *self._viewers]
        for stream in streams:
            stream.fail(self._closed_error())
        futures: list[asyncio.Future[Any]] = [self._started, *self._calls.values()]
        for future in futures:
            if not future.done():
                future.set_exception(self._closed_error())
        self._streams.clear()
        self._calls.clear()
        self._leaving.clear()
        self._viewers.clear()

    def _closed_error(self) -> EngineClosedError:
        assert self._death is not None
        reason, traceback = self._death
        error = EngineClosedError(reason)
        if traceback is not None:
            error.__cause__ = EngineError(f"in the engine:\n{traceback}")
        return error

    # --- small parts --------------------------------------------------------------------------------------------------

    @property
    def _owes_answers(self) -> bool:
        """Whether the engine still has to answer something."""
        return bool(self._streams or self._calls or self._leaving or self._pinged)

    def _note_if_idle(self) -> None:
        """Call this before a command is sent: a stall is measured from then on."""
        if not self._owes_answers:
            self._last_progress = time.monotonic()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._closed_error()

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the event loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def ended(self) -> None:
        """Wait until the engine has ended: it was closed, has failed, or was killed."""
        await self._disconnected.wait()

    async def close(self) -> None:
        """Shut the engine down; kill it if it does not end within seconds. Closing twice is allowed."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._die("the engine was closed")
        deadline = time.monotonic() + SECONDS_TO_STOP
        self._connection.send(Shutdown())
        try:
            await asyncio.wait_for(self._disconnected.wait(), SECONDS_TO_STOP)
        except TimeoutError:
            self._host.kill()
        remaining = max(SECONDS_TO_EXIT, deadline - time.monotonic())
        if await asyncio.to_thread(self._host.wait, remaining) is None:
            self._host.kill()
            await asyncio.to_thread(self._host.wait, SECONDS_TO_STOP)
        self._connection.close()
        await self._disconnected.wait()
        await asyncio.gather(*self._tasks)
