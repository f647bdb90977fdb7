"""An engine at one end of a socket: obeys commands, runs steps while there is work, reports what each step produced.

While idle it sleeps until a command arrives. Run as a module, `python -m nanovllm.remote.service FD`, it is the whole
program of a child process; a program that wants no second process calls `serve` in a thread.
"""

import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.pooling import Embeddings
from nanovllm.errors import RequestError
from nanovllm.remote.compile_pool import CompilePool
from nanovllm.remote.messages import (
    Abort,
    Aborted,
    AddRequest,
    Answer,
    Command,
    Embed,
    EngineStats,
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
from nanovllm.remote.new_deltas import new_deltas
from nanovllm.remote.transport import Transport, to_frame
from nanovllm.remote.views import ViewRecorder
from nanovllm.utils.child_process import parent_socket
from nanovllm.utils.logging import get_logger
from nanovllm.utils.short_pauses import shorten_pauses

logger = get_logger("nanovllm.remote.service")  # by name: run as a program, this module is called __main__

ENDED = object()
MAX_UNSENT = 64 << 20  # bytes that the client may leave unread before the engine waits for it


class Connection:
    """The engine's end of the socket: takes commands, sends events."""

    def __init__(self, sock: socket.socket) -> None:
        self._transport = Transport(sock, wakeable=True)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self.wake = self._transport.wake
        self.flush = self._transport.flush
        self.close = self._transport.close

    def receive(self, timeout: float | None) -> list[Command]:
        """The commands that have arrived, after up to `timeout` seconds of waiting. EOFError if the client is gone."""
        return [self._decoder.decode(frame) for frame in self._transport.receive(timeout)]

    def send(self, event: Event) -> None:
        """Send without waiting for the client to read, unless it has left too much unread."""
        self._transport.send(to_frame(event))
        if len(self._transport.unsent) > MAX_UNSENT:
            self._transport.flush()


class Service:
    """The loop of a started engine."""

    def __init__(self, engine: LLMEngine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._open = True
        self._compile_pool = CompilePool(when_done=connection.wake)
        self._embeddings = Embeddings(engine)
        self._embed_calls: dict[str, int] = {}  # calls to answer, by request id
        self._idle_work: Iterator[None] | None = engine.idle_work()  # that is left
        self._views: ViewRecorder | None = None  # while somebody watches
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._began = time.monotonic()

    def run(self) -> None:
        while self._open:
            for command in self._connection.receive(self._seconds_to_wait()):
                self._obey(command)
            for request in self._compile_pool.finished():
                self._add(request)
            if self._engine.has_work:
                self._step()
            elif self._idle_work is not None and next(self._idle_work, ENDED) is ENDED:
                self._idle_work = None
            if self._views is not None and self._views.seconds_to_next() == 0:
                self._connection.send(View(self._views.take(self._engine.scheduler, self._stats())))

    def close(self) -> None:
        self._idle_work = None  # it refers to the engine's memory
        self._engine.close()
        self._compile_pool.close()

    def _seconds_to_wait(self) -> float | None:
        """How long to wait for a command: 0 while there is work, else until the next view, or without limit."""
        if self._engine.has_work or self._idle_work is not None:
            return 0
        return None if self._views is None else self._views.seconds_to_next()

    def _step(self) -> None:
        began = time.monotonic()
        eos_token_ids = self._engine.eos_token_ids
        requests = self._engine.step_requests()
        deltas = [delta for request in requests for delta in new_deltas(request, eos_token_ids)]
        self._num_generation_tokens += sum([len(delta.token_ids) for delta in deltas])
        self._connection.send(StepDone(deltas))
        self._answer_embeddings()
        if self._views is not None and (plan := self._engine.last_plan) is not None:
            self._views.record_step(plan, seconds=began - self._began, duration=time.monotonic() - began)

    def _obey(self, command: Command) -> None:
        match command:
            case AddRequest() if command.params.structured_outputs is not None:
                self._compile_pool.submit(self._engine, command)
            case AddRequest():
                self._add(command)
            case Abort(request_ids):
                self._compile_pool.drop(request_ids)
                self._engine.abort(request_ids)
                self._connection.send(Aborted(request_ids))
            case GetStats(call):
                self._connection.send(Answer(call, stats=self._stats()))
            case ResetPrefixCache(call):
                self._engine.reset_prefix_cache()
                self._connection.send(Answer(call))
            case Embed():
                self._embed(command)
            case Watch(on):
                self._views = (self._views or ViewRecorder()) if on else None
            case Ping():
                self._engine.check_health()
                self._connection.send(Pong())
            case Shutdown():
                self._open = False
            case Start():
                raise RuntimeError("the engine was started twice")
        if self._views is not None:
            self._views.changed = True

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
            self._connection.send(Refused(command.request_id, str(error)))
        else:
            self._num_prompt_tokens += len(command.token_ids)

    def _embed(self, command: Embed) -> None:
        name = f"embedding {command.call}"
        try:
            self._embeddings.add(command.token_ids, command.pooling, request_id=name)
        except RequestError as error:
            self._connection.send(Answer(command.call, refusal=str(error)))
        else:
            self._embed_calls[name] = command.call

    def _answer_embeddings(self) -> None:
        for name, call in list(self._embed_calls.items()):
            embedding = self._embeddings.take(name)
            if embedding is not None:
                del self._embed_calls[name]
                self._connection.send(Answer(call, embedding=embedding))

    def _stats(self) -> EngineStats:
        scheduler, blocks = self._engine.scheduler, self._engine.scheduler.block_manager
        return EngineStats(
            num_running=len(scheduler.decoding) + len(scheduler.prefilling),
            num_waiting=len(scheduler.waiting),
            num_blocks=blocks.num_blocks,
            num_free_blocks=sum(pool.num_free for pool in blocks.pools),
            num_cached_blocks=sum(pool.num_available - pool.num_free for pool in blocks.pools),
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=blocks.num_queried_tokens,
            prefix_hits=blocks.num_hit_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
        )


# --- from start to end ------------------------------------------------------------------------------------------------


def serve(sock: socket.socket, *, own_process: bool = False) -> int:
    """Start the engine that the first command describes and run it until `Shutdown`; returns the exit status.

    `own_process`: also tune the garbage collector, which all threads of a process share.
    """
    connection = Connection(sock)
    service: Service | None = None
    try:
        service = Service(_start(connection), connection)
        if own_process:
            shorten_pauses()
        service.run()
        connection.flush()
        return 0
    except EOFError:
        return 0  # the client is gone
    except Exception as error:
        if service is not None:  # a failed start is reported to the client alone
            logger.exception("the engine has failed")
        with suppress(EOFError):
            connection.send(Failed(type(error).__name__, str(error), traceback.format_exc()))
            connection.flush()
        return 1
    finally:
        if service is not None:
            service.close()
        connection.close()


def _start(connection: Connection) -> LLMEngine:
    commands: list[Command] = []
    while not commands:
        commands = connection.receive(None)
    first = commands[0]
    if not isinstance(first, Start) or len(commands) > 1:
        raise RuntimeError(f"the first command must be one Start, not {commands}")
    engine = LLMEngine(first.model, serves=True, **first.options)
    sizes = engine.scheduler.config
    connection.send(
        Ready(
            max_model_len=engine.max_model_len,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            startup_seconds=engine.startup_seconds,
        )
    )
    return engine


def main() -> None:
    sys.exit(serve(parent_socket(), own_process=True))


if __name__ == "__main__":
    main()
