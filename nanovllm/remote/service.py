"""An engine at one end of a socket: takes commands, steps while there is work, tells what each step brought.

Idle, it sleeps until a command arrives. Run as a module, `python -m nanovllm.remote.service FD`, it is the whole of a
child process; `serve` in a thread does the same for a program that wants no second process.
"""

import os
import select
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestError
from nanovllm.plan import StepPlan
from nanovllm.remote import children
from nanovllm.remote.frames import FrameReader, to_frame
from nanovllm.remote.messages import (
    BLOCK_CACHED,
    BLOCK_IN_USE,
    BLOCK_SHARED,
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
    RequestView,
    ResetPrefixCache,
    Shutdown,
    Start,
    StepDone,
    StepView,
    View,
    Watch,
)
from nanovllm.utils.collector import calm_collector
from nanovllm.utils.logging import get_logger

logger = get_logger("nanovllm.remote.service")  # also where this module is the program

RECEIVE_BYTES = 1 << 20
MAX_BACKLOG = 64 << 20  # bytes that the other side may leave unread before steps wait for it
SECONDS_BETWEEN_VIEWS = 0.1
MAX_STEPS_KEPT = 1000  # for the next view
NUM_COMPILING = 2  # grammars at once; more wait


class Wire:
    """The engine's end of the socket. Sending does not wait for the reader: what does not fit yet goes out later."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poll = select.poll()
        self._frames = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._backlog = bytearray()
        self._alarm, self._alarm_button = os.pipe()
        os.set_blocking(self._alarm_button, False)
        self._poll.register(self._alarm, select.POLLIN)

    def receive(self, timeout: float | None) -> list[Command]:
        """The commands that are there, after up to `timeout` seconds of waiting. EOFError once nobody listens."""
        ready = self._wait(timeout)
        if not ready:
            return []
        if self._alarm in ready:
            os.read(self._alarm, RECEIVE_BYTES)
        self._send_backlog()
        return [self._decoder.decode(frame) for frame in self._frames.feed(self._read())]

    def wake(self) -> None:
        """From any thread: end the present or next wait in `receive`."""
        with suppress(BlockingIOError):  # full: the alarm is on already
            os.write(self._alarm_button, b"!")

    def send(self, event: Event) -> None:
        self._backlog += to_frame(event)
        self._send_backlog()
        if len(self._backlog) > MAX_BACKLOG:
            self.flush()

    def flush(self) -> None:
        """Wait until all is sent."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while self._backlog:
            room.poll()
            self._send_backlog()

    def close(self) -> None:
        self._socket.close()
        os.close(self._alarm)
        os.close(self._alarm_button)

    def _wait(self, timeout: float | None) -> set[int]:
        """The file descriptors that are ready."""
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._backlog else 0))
        return {fd for fd, _ in self._poll.poll(None if timeout is None else 1000 * timeout)}

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return b""
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return data

    def _send_backlog(self) -> None:
        try:
            while self._backlog:
                del self._backlog[: self._socket.send(self._backlog)]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError from error


class Workshop:
    """Requests whose grammar is being compiled, in threads beside the loop: it may take seconds."""

    def __init__(self, when_done: Callable[[], None]) -> None:
        self._when_done = when_done
        self._threads = ThreadPoolExecutor(NUM_COMPILING, thread_name_prefix="nanovllm-grammar")
        self._under_way: dict[str, AddRequest] = {}
        self._done: deque[AddRequest] = deque()

    def take_on(self, engine: LLMEngine, request: AddRequest) -> None:
        self._under_way[request.request_id] = request
        self._threads.submit(self._compile, engine, request)

    def _compile(self, engine: LLMEngine, request: AddRequest) -> None:
        """`add_request` will find the grammar, or the refusal, in the compiler's cache; another error it meets anew."""
        assert request.params.structured_outputs is not None
        try:
            engine.compiler.compile(request.params.structured_outputs)
        except RequestError:
            pass
        finally:
            self._done.append(request)
            self._when_done()

    def drop(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self._under_way.pop(name, None)

    def finished(self) -> list[AddRequest]:
        """Those that can be added now."""
        found = []
        while self._done:
            request = self._done.popleft()
            if self._under_way.get(request.request_id) is request:  # else it was dropped
                found.append(self._under_way.pop(request.request_id))
        return found

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class Service:
    """The loop of a started engine."""

    def __init__(self, engine: LLMEngine, wire: Wire) -> None:
        self._engine = engine
        self._wire = wire
        self._open = True
        self._workshop = Workshop(when_done=wire.wake)
        self._embeds: deque[Embed] = deque()  # that wait for blocks
        self._picture: Picture | None = None  # while somebody watches
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._began = time.monotonic()

    def run(self) -> None:
        while self._open:
            for command in self._wire.receive(self._patience()):
                self._obey(command)
            for request in self._workshop.finished():
                self._add(request)
            if self._engine.has_work:
                self._step()
            self._embed()
            if self._picture is not None and self._picture.seconds_to_next() == 0:
                self._wire.send(View(self._picture.draw(self._engine.scheduler, self._stats())))

    def close(self) -> None:
        self._engine.close()
        self._workshop.close()

    def _patience(self) -> float | None:
        """How long to wait for a command: not at all while there is work, else until the next view, or for ever."""
        if self._engine.has_work:
            return 0
        return None if self._picture is None else self._picture.seconds_to_next()

    def _step(self) -> None:
        began = time.monotonic()
        deltas = self._engine.step_deltas()
        self._num_generation_tokens += sum([len(delta.token_ids) for delta in deltas])
        self._wire.send(StepDone(deltas))
        if self._picture is not None and (plan := self._engine.last_plan) is not None:
            self._picture.saw(plan, seconds=began - self._began, duration=time.monotonic() - began)

    def _obey(self, command: Command) -> None:
        match command:
            case AddRequest() if command.params.structured_outputs is not None:
                self._workshop.take_on(self._engine, command)
            case AddRequest():
                self._add(command)
            case Abort(request_ids):
                self._workshop.drop(request_ids)
                self._engine.abort(request_ids)
                self._wire.send(Aborted(request_ids))
            case GetStats(call):
                self._wire.send(Answer(call, stats=self._stats()))
            case ResetPrefixCache(call):
                self._engine.reset_prefix_cache()
                self._wire.send(Answer(call))
            case Embed():
                self._embeds.append(command)
            case Watch(on):
                self._picture = (self._picture or Picture()) if on else None
            case Ping():
                self._engine.check_health()
                self._wire.send(Pong())
            case Shutdown():
                self._open = False
            case Start():
                raise RuntimeError("the engine was started twice")
        if self._picture is not None:
            self._picture.changed = True

    def _add(self, command: AddRequest) -> None:
        try:
            self._engine.add_request(
                {"prompt_token_ids": command.token_ids, "cache_salt": command.cache_salt},
                command.params,
                request_id=command.request_id,
                priority=command.priority,
                stream=True,
            )
        except RequestError as error:
            self._wire.send(Refused(command.request_id, str(error)))
        else:
            self._num_prompt_tokens += len(command.token_ids)

    def _embed(self) -> None:
        """Answer embeddings in order, as far as there are blocks for them."""
        while self._embeds:
            wanted = self._embeds[0]
            try:
                embedding = self._engine.embed(wanted.token_ids, wanted.pooling)
                if embedding is None:
                    return
                self._wire.send(Answer(wanted.call, embedding=embedding))
            except RequestError as error:
                self._wire.send(Answer(wanted.call, refusal=str(error)))
            self._embeds.popleft()

    def _stats(self) -> EngineStats:
        scheduler, blocks = self._engine.scheduler, self._engine.scheduler.block_manager
        return EngineStats(
            num_running=len(scheduler.decoding) + len(scheduler.prefilling),
            num_waiting=len(scheduler.waiting),
            num_blocks=blocks.num_blocks,
            num_free_blocks=len(blocks._free),
            num_cached_blocks=len(blocks._cached),
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=blocks.num_queried_tokens,
            prefix_hits=blocks.num_hit_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
        )


class Picture:
    """What goes into the next view, and when that is due."""

    def __init__(self) -> None:
        self.changed = True
        self._steps: deque[StepView] = deque(maxlen=MAX_STEPS_KEPT)
        self._next = 0.0

    def saw(self, plan: StepPlan, *, seconds: float, duration: float) -> None:
        num_prefill_tokens = sum(chunk.num_new for chunk in plan.chunks)
        self._steps.append(StepView(seconds, num_prefill_tokens, len(plan.decode_rows), 1000 * duration))
        self.changed = True

    def seconds_to_next(self) -> float | None:
        """None while there is nothing new to show."""
        return max(0.0, self._next - time.monotonic()) if self.changed else None

    def draw(self, scheduler: Scheduler, stats: EngineStats) -> EngineView:
        self.changed = False
        self._next = time.monotonic() + SECONDS_BETWEEN_VIEWS
        steps = list(self._steps)
        self._steps.clear()
        states, owners = block_states(scheduler)
        return EngineView(
            stats=stats,
            blocks=states,
            owners=owners,
            running=[_request_view(seq) for seq in scheduler.running],
            waiting=[_request_view(seq) for seq in scheduler.waiting],
            steps=steps,
        )


def block_states(scheduler: Scheduler) -> tuple[bytes, list[int]]:
    """What each block is, and the number of the first sequence that uses it."""
    manager = scheduler.block_manager
    states = bytearray(manager.num_blocks)
    owners = [0] * manager.num_blocks
    for block in manager._cached:
        states[block] = BLOCK_CACHED
    for seq in scheduler.running:
        for block in seq.block_table:
            states[block] = BLOCK_SHARED if owners[block] else BLOCK_IN_USE
            owners[block] = owners[block] or seq.row
    return bytes(states), owners


def _request_view(seq: Sequence) -> RequestView:
    return RequestView(
        request_id=seq.request_id,
        num_prompt=seq.num_prompt_tokens,
        num_generated=seq.num_completion_tokens,
        num_computed=seq.num_computed_tokens,
        owner=seq.row,
    )


# --- a life from start to end -----------------------------------------------------------------------------------------


def serve(sock: socket.socket, *, own_process: bool = False) -> int:
    """Start the engine that the first command names and serve it until told to stop; the exit status.

    In a process of its own the garbage collector is calmed: it is shared by all threads.
    """
    wire = Wire(sock)
    service: Service | None = None
    try:
        service = Service(_start(wire), wire)
        if own_process:
            calm_collector()
        service.run()
        wire.flush()
        return 0
    except EOFError:
        return 0  # nobody is left to serve
    except Exception as error:
        if service is not None:  # else who asked for the start is told, and nobody but them needs to know
            logger.exception("the engine has failed")
        with suppress(EOFError):
            wire.send(Failed(type(error).__name__, str(error), traceback.format_exc()))
            wire.flush()
        return 1
    finally:
        if service is not None:
            service.close()
        wire.close()


def _start(wire: Wire) -> LLMEngine:
    commands: list[Command] = []
    while not commands:
        commands = wire.receive(None)
    first = commands[0]
    if not isinstance(first, Start) or len(commands) > 1:
        raise RuntimeError(f"one Start must come first, not {commands}")
    engine = LLMEngine(first.model, **first.options)
    sizes = engine.scheduler.config
    wire.send(
        Ready(
            max_model_len=engine.max_model_len,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            startup_seconds=engine.startup_seconds,
        )
    )
    return engine


def main() -> None:
    sys.exit(serve(children.parents_socket(), own_process=True))


if __name__ == "__main__":
    main()
