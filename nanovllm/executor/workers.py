"""An executor whose ranks are workers outside this process: it sends every plan to all of them and gets the result
from one.

`Workers` carries the commands; its implementations are in multiproc.py and ray.py. This file gives them a meaning: the
start, steps under way, the check that all ranks sampled the same tokens, and the error if a rank fails.
"""

import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from nanovllm.config import Config
from nanovllm.distributed.collectives import sampling_rank
from nanovllm.distributed.group import Rank
from nanovllm.errors import EngineClosedError, EngineError, NanoError
from nanovllm.executor.messages import (
    Answer,
    Command,
    Failed,
    Launch,
    Lost,
    Open,
    Opened,
    Ready,
    Reply,
    Sample,
    Start,
    Stop,
    Wait,
    lean,
)
from nanovllm.plan import StepPlan, StepResult
from nanovllm.remote.transport import raised_elsewhere, to_frame

MAX_CALLS = 8  # older answers that were never read are dropped: after Ctrl-C nobody reads them
GRACE_SECONDS = 0.5  # from the end of one rank until the ranks that wait for it in a collective have failed too
SECONDS_TO_STOP = 5.0  # from the stop command until workers are killed

Replies = list[tuple[int, Reply]]  # with the rank that sent each
Kind = TypeVar("Kind", bound=Reply)


class Workers(Protocol):
    """The workers of one executor, one per rank, and the way to send them commands."""

    size: int
    host: str  # the address of rank 0, as the other ranks reach it
    local_ranks: list[int]  # for each rank, the index of its device on its host
    num_local: list[int]  # for each rank, the number of ranks on its host

    def send(self, frame: bytes, ranks: Iterable[int]) -> None:
        """Queue a command for all of these ranks or, if Ctrl-C comes first, for none. Never blocks, and does not raise
        if a worker is gone: `receive` reports that."""
        ...

    def receive(self, timeout: float | None) -> Replies:
        """The replies that have arrived; if there are none, waits up to `timeout` seconds (None: without limit). A
        worker that is gone has a `Lost` among them."""
        ...

    def end(self, grace_seconds: float = 0.0) -> Replies:
        """Kill all workers and return their last replies, with `Lost` for each that had ended by itself.

        Before that, `grace_seconds` are left for others to end: the rank that ended first, which is the cause, may not
        be the first that was noticed.
        """
        ...

    def close(self, farewell: bytes, timeout: float) -> None:
        """Send all workers the command `farewell` and wait until they have ended; kill them after `timeout` seconds."""
        ...


class WorkersExecutor:
    runs_beside_host = True

    def __init__(self, workers: Workers, config: Config, path: Path, *, max_model_len: int) -> None:
        self._workers = workers
        self._all_ranks = range(workers.size)
        self._timeout = config.worker_timeout
        self._ranks = [
            Rank(
                index=index,
                tensor_parallel_size=config.tensor_parallel_size,
                pipeline_parallel_size=config.pipeline_parallel_size,
                local_rank=workers.local_ranks[index],
            )
            for index in self._all_ranks
        ]
        self._failure: NanoError | None = None
        self._closed = False
        self._started = False
        self._num_launched = 0
        self._num_calls = 0
        self._answers: defaultdict[int, dict[int, Answer]] = defaultdict(dict)  # by call and rank, until read
        self._last_step: weakref.ref[WorkersStep] | None = None
        self._last_launch: tuple[StepPlan | None, bytes] = (None, b"")
        try:
            ready = self._start(config, path, max_model_len)
        except BaseException:
            workers.end()
            raise
        self._started = True
        self.num_blocks = min(answer.num_blocks for answer in ready)
        self.startup_seconds = ready[0].startup_seconds

    def _start(self, config: Config, path: Path, max_model_len: int) -> list[Ready]:
        workers = self._workers
        self._send(Open(workers.host), [0])
        (opened,) = self._collect(Opened, [0])
        for rank in self._ranks:
            start = Start(
                rank=rank,
                num_local=workers.num_local[rank.index],
                host=workers.host,
                port=opened.port,
                config=config,
                path=str(path),
                max_model_len=max_model_len,
            )
            self._send(start, [rank.index])
        return self._collect(Ready, self._all_ranks)

    # --- steps --------------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> "WorkersStep":
        self._check_open()
        last_plan, frame = self._last_launch
        if plan is not last_plan:
            frame = to_frame(Launch(lean(plan)))
            self._last_launch = (plan, frame)
        wait_command = self._wait_ahead()
        self._num_launched += 1
        step = WorkersStep(self, self._num_launched, sampled=not plan.guided_rows)
        self._last_step = weakref.ref(step)
        self._workers.send(frame + wait_command, self._all_ranks)
        return step

    def _wait_ahead(self) -> bytes:
        """The `Wait` command for the step before the one being launched, which will be waited for next. Sent with the
        launch, it saves a message."""
        before = None if self._last_step is None else self._last_step()
        if before is None or before.call is not None or not before.sampled:
            return b""
        before.call = self._next_call()
        return to_frame(Wait(before.call, num_later=1))

    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        self._check_open()
        self._send(Sample({row: list(each) for row, each in masks.items()}), self._all_ranks)

    def wait(self, step: "WorkersStep") -> StepResult:
        self._check_open()
        if step.call is None:
            step.call = self._next_call()
            self._send(Wait(step.call, num_later=self._num_launched - step.number), self._all_ranks)
        result = self._answer(step.call).result
        assert result is not None
        return result

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _answer(self, call: int) -> Answer:
        """The answer of the rank that returns results, once all ranks have answered with the same checksum."""
        deadline = time.monotonic() + self._timeout
        while len(self._answers[call]) < self._workers.size:
            self._take(self._receive(deadline - time.monotonic()))
            if time.monotonic() >= deadline and (silent := set(self._all_ranks) - self._answers[call].keys()):
                self._give_up([], f"{_named(silent)} not answered for {self._timeout:g} s")
        answers = self._answers.pop(call)
        for old in [number for number in self._answers if number < call - MAX_CALLS]:
            del self._answers[old]
        if any(answer.checksum != answers[0].checksum for answer in answers.values()):
            checksums = ", ".join(f"rank {rank}: {answers[rank].checksum:08x}" for rank in self._all_ranks)
            self._fail(EngineError(f"the ranks disagree about the tokens that were sampled; checksums: {checksums}"))
        return answers[sampling_rank(self._ranks[0])]

    def _take(self, replies: Replies) -> None:
        for rank, reply in replies:
            if isinstance(reply, Answer):
                self._answers[reply.call][rank] = reply

    def _collect(self, kind: type[Kind], ranks: Sequence[int]) -> list[Kind]:
        """The next reply of each of these ranks; `kind` is its type."""
        found: dict[int, Kind] = {}
        while len(found) < len(ranks):
            found |= {rank: reply for rank, reply in self._receive(None) if isinstance(reply, kind)}
        return [found[rank] for rank in ranks]

    def _receive(self, timeout: float | None) -> Replies:
        replies = self._workers.receive(None if timeout is None else max(0.0, timeout))
        if any(isinstance(reply, Failed | Lost) for _, reply in replies):
            self._give_up(replies)
        return replies

    def _send(self, command: Command, ranks: Iterable[int]) -> None:
        self._workers.send(to_frame(command), ranks)

    def idle_work(self) -> Iterator[None]:
        """None: each rank prepares for a step when it first runs it."""
        return iter(())

    # --- the end ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise EngineError if a worker has failed or is gone, also if that happened between steps."""
        self._check_open()
        self._take(self._receive(0))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            self._workers.close(to_frame(Stop()), SECONDS_TO_STOP)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineClosedError(
                f"the workers were stopped by an earlier failure: {self._failure}"
            ) from self._failure
        if self._closed:
            raise EngineClosedError("the workers were stopped")

    def _give_up(self, replies: Replies, otherwise: str = "") -> NoReturn:
        """Stop all ranks and raise the cause: a rank that ended without a reply, else the rank that failed first. Other
        ranks often fail as a consequence."""
        last_words = replies + self._workers.end(GRACE_SECONDS)
        failures = {rank: reply for rank, reply in last_words if isinstance(reply, Failed)}
        lost = {rank: reply for rank, reply in last_words if isinstance(reply, Lost) and rank not in failures}
        for rank, reply in lost.items():
            self._fail(EngineError(f"rank {rank} {reply.how}"))
        for rank in sorted(failures, key=lambda rank: failures[rank].when):
            self._fail(self._as_raised(rank, failures[rank]))
        self._fail(EngineError(otherwise))

    def _as_raised(self, rank: int, failed: Failed) -> NanoError:
        """The error that a rank raised: the same class during the start, an EngineError after it."""
        where = f"rank {rank}"
        error = raised_elsewhere(failed.kind, failed.message, failed.traceback, where=where)
        if not self._started:
            return error
        failure = EngineError(f"{where} failed: {failed.kind}: {failed.message}")
        failure.__cause__ = error.__cause__
        return failure

    def _fail(self, error: NanoError) -> NoReturn:
        self._failure = error
        self._workers.end()
        raise error


class WorkersStep:
    """A step that was launched."""

    def __init__(self, executor: WorkersExecutor, number: int, *, sampled: bool) -> None:
        self._executor = executor
        self.number = number  # counts launches
        self.sampled = sampled  # no masks are missing
        self.call: int | None = None  # of the `Wait` command, once sent

    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        self._executor.sample(masks)
        self.sampled = True

    def wait(self) -> StepResult:
        return self._executor.wait(self)


def _named(ranks: Iterable[int]) -> str:
    names = [f"rank {rank}" for rank in sorted(ranks)]
    return f"{names[0]} has" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} have"
