"""One rank of an engine: obeys an executor's commands one after another, in a child process or a Ray actor.

`python -m nanovllm.executor.worker FD` is the program of a child process, which reads its commands from a socket.
"""

import os
import socket
import sys
import time
import traceback
import zlib
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nanovllm.distributed.collectives import open_store, sampling_rank
from nanovllm.executor.base import StepHandle
from nanovllm.executor.messages import (
    Answer,
    Command,
    Failed,
    Launch,
    Open,
    Opened,
    Ready,
    Reply,
    Sample,
    Start,
    Stop,
    Wait,
)
from nanovllm.plan import StepPlan
from nanovllm.remote.transport import Transport, to_frame
from nanovllm.utils.child_process import parent_socket
from nanovllm.utils.short_pauses import shorten_pauses

SECONDS_TO_MEET = 1800.0  # for the ranks to connect; also how much longer than another one a rank may take to load


class Runner(Protocol):
    """The part of ModelRunner that a worker uses."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def startup_seconds(self) -> dict[str, float]: ...
    def launch(self, plan: StepPlan) -> StepHandle: ...
    def close(self) -> None: ...


class Model(Protocol):
    """Makes runners; tests use one without a model."""

    def open_store(self, host: str) -> Any:
        """On rank 0: open the store where ranks find each other; its `port` is sent to the others."""
        ...

    def build(self, start: Start, store: Any) -> Runner:
        """Connect to the other ranks and load the model; `store` is given on rank 0 only."""
        ...


class Worker:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._store: Any = None
        self._runner: Runner
        self._reports = False  # whether this rank returns results
        self._steps: deque[StepHandle] = deque()
        self._checksum = 0
        self._last_launch: tuple[bytes, StepPlan] = (b"", StepPlan())
        self.stopped = False

    def obey(self, frame: bytes) -> Reply | None:
        """Run one command; returns its reply, if it has one. An exception becomes a `Failed` and stops the worker."""
        try:
            return self._obey(self._read(frame))
        except Exception as error:
            self.stopped = True
            return Failed(type(error).__name__, str(error), traceback.format_exc(), time.time())

    def _read(self, frame: bytes) -> Command:
        """Decode a command. The same bytes as before give the same plan object, and equal decode rows the same tuple
        object: the runner compares them by identity."""
        last_frame, last_plan = self._last_launch
        if frame == last_frame:
            return Launch(last_plan)
        command = self._decoder.decode(frame)
        if not isinstance(command, Launch):
            return command
        plan = command.plan
        if plan.decode_rows == last_plan.decode_rows:
            plan = replace(plan, decode_rows=last_plan.decode_rows)
        self._last_launch = (frame, plan)
        return Launch(plan)

    def _obey(self, command: Command) -> Reply | None:
        match command:
            case Launch(plan):
                self._steps.append(self._runner.launch(plan))
            case Sample(masks):
                self._steps[-1].sample(masks)
            case Wait(call, num_later):
                return self._wait(call, num_later)
            case Open(host):
                self._store = self._model.open_store(host)
                return Opened(self._store.port)
            case Start():
                return self._start(command)
            case Stop():
                self._runner.close()
                self.stopped = True
        return None

    def _start(self, start: Start) -> Ready:
        self._runner = self._model.build(start, self._store)
        self._reports = start.rank.index == sampling_rank(start.rank)
        return Ready(self._runner.num_blocks, self._runner.startup_seconds)

    def _wait(self, call: int, num_later: int) -> Answer:
        while len(self._steps) > num_later + 1:
            self._steps.popleft()
        result = self._steps.popleft().wait()
        self._checksum = zlib.crc32(self._encoder.encode(result.tokens), self._checksum)
        return Answer(call, self._checksum, result=result if self._reports else None)


# --- the model --------------------------------------------------------------------------------------------------------


class _ModelRank:
    """A ModelRunner that is one of several ranks."""

    def __init__(self, start: Start, store: Any) -> None:
        import torch

        from nanovllm.distributed.collectives import join
        from nanovllm.models.registry import describe
        from nanovllm.runner.device import resolve_device
        from nanovllm.runner.make import make_runner

        device = resolve_device(start.config.device, start.rank.local_rank if start.rank.world_size > 1 else None)
        if device.index is not None:
            torch.cuda.set_device(device)
        if device.type == "cpu":
            # for the whole process, which is this rank's alone
            torch.set_num_threads(max(1, torch.get_num_threads() // start.num_local))
        self._parallel = join(
            start.rank, device, host=start.host, port=start.port, store=store, timeout_seconds=SECONDS_TO_MEET
        )
        self._runner = make_runner(
            start.config,
            describe(Path(start.path)).config,
            Path(start.path),
            device=device,
            max_model_len=start.max_model_len,
            parallel=self._parallel,
        )
        self.num_blocks = self._runner.num_blocks
        self.startup_seconds = self._runner.startup_seconds
        self.launch = self._runner.launch

    def close(self) -> None:
        self._runner.close()
        self._parallel.close()


class RealModel:
    def open_store(self, host: str) -> Any:
        return open_store(host)

    def build(self, start: Start, store: Any) -> Runner:
        return _ModelRank(start, store)


# --- a process --------------------------------------------------------------------------------------------------------


def serve(sock: socket.socket, worker: Worker) -> int:
    """Obey the commands that the socket brings until `Stop`; returns the exit status."""
    transport = Transport(sock)
    try:
        while True:
            for frame in transport.receive(None):
                reply = worker.obey(frame)
                if reply is not None:
                    transport.send(to_frame(reply))
                    transport.flush()
                if worker.stopped:
                    return int(isinstance(reply, Failed))
                if isinstance(reply, Ready):
                    shorten_pauses()
    except EOFError:
        return 1  # the executor is gone


def run(model: Model) -> None:
    """The main program of a worker's process."""
    status = serve(parent_socket(), Worker(model))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an orderly exit would wait for threads that a failed peer may have left in a collective


if __name__ == "__main__":
    run(RealModel())
