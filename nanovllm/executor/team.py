"""An executor over several ranks that run elsewhere: plans out to all, the result back from one, and one end for all.

How commands reach the ranks is a crew's business. Here is what they mean: the start, steps under way, the check that
all ranks drew the same tokens, and what is said when a rank fails.
"""

import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from nanovllm.config import Config
from nanovllm.distributed.group import Place
from nanovllm.errors import EngineClosedError, EngineError, NanoError, raised_elsewhere
from nanovllm.executor.messages import (
    Answer,
    Command,
    Embed,
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
from nanovllm.models.spec import ModelConfig
from nanovllm.plan import StepPlan, StepResult
from nanovllm.remote.frames import to_frame

MAX_CALLS = 8  # back to which answers are kept that nobody has asked for yet; after Ctrl-C nobody will
PATIENCE = 0.5  # seconds between a rank's end and that of those who were waiting for it
SECONDS_TO_STOP = 5.0  # before workers that were told to are ended by force

Replies = list[tuple[int, Reply]]  # with the rank that sent each
Kind = TypeVar("Kind", bound=Reply)


class Crew(Protocol):
    """The workers of one executor and the way to them."""

    size: int
    host: str  # rank 0's, where the others can reach it
    local_ranks: list[int]  # which of its host's devices each rank takes
    num_local: list[int]  # ranks on each rank's host

    def send(self, frame: bytes, ranks: Iterable[int]) -> None:
        """Queue a command for all of these or, if Ctrl-C comes first, for none. Never waits, and says nothing if a
        worker is gone: `receive` does."""
        ...

    def receive(self, timeout: float | None) -> Replies:
        """What has come, after up to `timeout` seconds of waiting if that is nothing; `Lost` for who is gone."""
        ...

    def end(self, patience: float = 0.0) -> Replies:
        """End every worker by force; what they still said, and `Lost` for who was gone before. With `patience`, first
        see who else ends within so many seconds: who ended first may not be the first to be heard of."""
        ...

    def close(self, farewell: bytes, timeout: float) -> None:
        """Tell all to end and wait until they have; by force after `timeout` seconds."""
        ...


class TeamExecutor:
    runs_beside_host = True

    def __init__(
        self, crew: Crew, config: Config, model_config: ModelConfig, path: Path, *, max_model_len: int
    ) -> None:
        self._crew = crew
        self._everyone = range(crew.size)
        self._timeout = config.worker_timeout
        self._places = [
            Place(
                rank=rank,
                tensor_parallel_size=config.tensor_parallel_size,
                pipeline_parallel_size=config.pipeline_parallel_size,
                local_rank=crew.local_ranks[rank],
            )
            for rank in self._everyone
        ]
        self._failure: NanoError | None = None
        self._closed = False
        self._started = False
        self._num_launched = 0
        self._num_calls = 0
        self._answers: defaultdict[int, dict[int, Answer]] = defaultdict(dict)  # by call and rank, until asked for
        self._last_step: weakref.ref[TeamStep] | None = None
        self._last_launch: tuple[StepPlan | None, bytes] = (None, b"")
        try:
            ready = self._start(config, model_config, path, max_model_len)
        except BaseException:
            crew.end()
            raise
        self._started = True
        self.num_blocks = min(answer.num_blocks for answer in ready)
        self.startup_seconds = ready[0].startup_seconds

    def _start(self, config: Config, model_config: ModelConfig, path: Path, max_model_len: int) -> list[Ready]:
        crew = self._crew
        self._send(Open(crew.host), [0])
        (opened,) = self._collect(Opened, [0])
        for place in self._places:
            start = Start(
                place=place,
                num_local=crew.num_local[place.rank],
                host=crew.host,
                port=opened.port,
                config=config,
                model_config=model_config,
                path=str(path),
                max_model_len=max_model_len,
            )
            self._send(start, [place.rank])
        return self._collect(Ready, self._everyone)

    # --- steps --------------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> "TeamStep":
        self._check_open()
        last_plan, frame = self._last_launch
        if plan is not last_plan:
            frame = to_frame(Launch(lean(plan)))
            self._last_launch = (plan, frame)
        question = self._ask_ahead()
        self._num_launched += 1
        step = TeamStep(self, self._num_launched, sampled=not plan.guided_rows)
        self._last_step = weakref.ref(step)
        self._crew.send(frame + question, self._everyone)
        return step

    def _ask_ahead(self) -> bytes:
        """The question for the step before the one to be launched, which is waited for next: it saves a message."""
        before = None if self._last_step is None else self._last_step()
        if before is None or before.call is not None or not before.sampled:
            return b""
        before.call = self._next_call()
        return to_frame(Wait(before.call, behind=1))

    def sample(self, masks: Mapping[int, bytes]) -> None:
        self._check_open()
        self._send(Sample(dict(masks)), self._everyone)

    def wait(self, step: "TeamStep") -> StepResult:
        self._check_open()
        if step.call is None:
            step.call = self._next_call()
            self._send(Wait(step.call, behind=self._num_launched - step.number), self._everyone)
        result = self._answer(step.call).result
        assert result is not None
        return result

    def embed(self, token_ids: list[int], block_table: list[int], pooling: str) -> list[float]:
        self._check_open()
        call = self._next_call()
        self._send(Embed(call, token_ids, block_table, pooling), self._everyone)
        embedding = self._answer(call).embedding
        assert embedding is not None
        return embedding

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _answer(self, call: int) -> Answer:
        """The reporting rank's answer, once all have answered and agree."""
        deadline = time.monotonic() + self._timeout
        while len(self._answers[call]) < self._crew.size:
            self._take(self._receive(deadline - time.monotonic()))
            if time.monotonic() >= deadline and (silent := set(self._everyone) - self._answers[call].keys()):
                self._give_up([], f"{_named(silent)} not answered for {self._timeout:g} s")
        answers = self._answers.pop(call)
        for old in [number for number in self._answers if number < call - MAX_CALLS]:
            del self._answers[old]
        if any(answer.checksum != answers[0].checksum for answer in answers.values()):
            told = ", ".join(f"rank {rank}: {answers[rank].checksum:08x}" for rank in self._everyone)
            self._fail(EngineError(f"the ranks disagree about the tokens they have sampled; checksums: {told}"))
        return next(answers[place.rank] for place in self._places if place.carries_result)

    def _take(self, replies: Replies) -> None:
        for rank, reply in replies:
            if isinstance(reply, Answer):
                self._answers[reply.call][rank] = reply

    def _collect(self, kind: type[Kind], ranks: Sequence[int]) -> list[Kind]:
        """The next reply of each of these ranks, which is of this kind."""
        found: dict[int, Kind] = {}
        while len(found) < len(ranks):
            found |= {rank: reply for rank, reply in self._receive(None) if isinstance(reply, kind)}
        return [found[rank] for rank in ranks]

    def _receive(self, timeout: float | None) -> Replies:
        replies = self._crew.receive(None if timeout is None else max(0.0, timeout))
        if any(isinstance(reply, Failed | Lost) for _, reply in replies):
            self._give_up(replies)
        return replies

    def _send(self, command: Command, ranks: Iterable[int]) -> None:
        self._crew.send(to_frame(command), ranks)

    # --- the end ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """EngineError if a worker has failed or is gone; also notices what happened while nothing was asked."""
        self._check_open()
        self._take(self._receive(0))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            self._crew.close(to_frame(Stop()), SECONDS_TO_STOP)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineClosedError(f"the workers were ended by an earlier failure: {self._failure}") from self._failure
        if self._closed:
            raise EngineClosedError("the workers were ended")

    def _give_up(self, replies: Replies, otherwise: str = "") -> NoReturn:
        """End all ranks and raise the cause: a rank that vanished, or the first that failed; others may follow it."""
        last_words = replies + self._crew.end(PATIENCE)
        failures = {rank: reply for rank, reply in last_words if isinstance(reply, Failed)}
        lost = {rank: reply for rank, reply in last_words if isinstance(reply, Lost) and rank not in failures}
        for rank, reply in lost.items():
            self._fail(EngineError(f"rank {rank} {reply.how}"))
        for rank in sorted(failures, key=lambda rank: failures[rank].when):
            self._fail(self._as_raised(rank, failures[rank]))
        self._fail(EngineError(otherwise))

    def _as_raised(self, rank: int, failed: Failed) -> NanoError:
        """What a rank raised: as it is while the engine starts, then as the end of the engine."""
        where = f"rank {rank}"
        error = raised_elsewhere(failed.kind, failed.message, failed.traceback, where=where)
        if not self._started:
            return error
        failure = EngineError(f"{where} failed: {failed.kind}: {failed.message}")
        failure.__cause__ = error.__cause__
        return failure

    def _fail(self, error: NanoError) -> NoReturn:
        self._failure = error
        self._crew.end()
        raise error


class TeamStep:
    """A step under way."""

    def __init__(self, team: TeamExecutor, number: int, *, sampled: bool) -> None:
        self._team = team
        self.number = number  # of all that were launched
        self.sampled = sampled  # or told what it may sample
        self.call: int | None = None  # by which its result was asked for

    def sample(self, masks: Mapping[int, bytes]) -> None:
        self._team.sample(masks)
        self.sampled = True

    def wait(self) -> StepResult:
        return self._team.wait(self)


def _named(ranks: Iterable[int]) -> str:
    names = [f"rank {rank}" for rank in sorted(ranks)]
    return f"{names[0]} has" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} have"
