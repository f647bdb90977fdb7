"""A worker without a model: a plan's first decode row chooses the behaviour, the second is the token it returns.

Run as a program it is a worker's process: `python -m tests.executor.fake_worker FD`.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.executor.messages import Start
from nanovllm.executor.worker import run
from nanovllm.plan import StepPlan, StepResult, TokenLogprobs

ECHO, RAISE, HANG, KILLED, SPLIT, SLOW, LONG_RESULT, STOPPED = range(8)
FAULTY_RANK = 1
SLOW_SECONDS = 0.4
NUM_LONG = 200_000


class FakeStep:
    def __init__(self, rank: int, plan: StepPlan) -> None:
        self._rank, self._plan = rank, plan
        self._masks: Mapping[int, Sequence[bytes]] = {}

    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        self._masks = masks

    def wait(self) -> StepResult:
        if self._plan.guided_rows:
            return StepResult(tokens=[[row, *b"".join(masks)] for row, masks in self._masks.items()])
        if self._plan.row_steps:
            return StepResult(
                pooled={step.row: [float(self._rank), float(step.num_new)] for step in self._plan.row_steps}
            )
        if self._plan.new_rows:
            return StepResult(tokens=[list(row.token_ids) for row in self._plan.new_rows])
        what, token = self._plan.decode_rows
        if what == SPLIT and self._rank == FAULTY_RANK:
            return StepResult(tokens=[[token + 1]])
        if what == LONG_RESULT:
            scores = [TokenLogprobs((number,), (-0.5,), 1) for number in range(NUM_LONG)]
            return StepResult(tokens=[[token]], prompt_logprobs={7: scores})
        return StepResult(tokens=[[token]])


class FakeModel:
    port = 1234

    def open_store(self, host: str) -> "FakeModel":
        return self

    def build(self, start: Start, store: Any) -> "FakeRunner":
        return FakeRunner(start, store)


class FakeRunner:
    startup_seconds = {"fake": 1.5}

    def __init__(self, start: Start, store: Any) -> None:
        self._rank = start.rank.index
        self.num_blocks = 100 - self._rank
        assert (store is not None) == (self._rank == 0)
        assert start.port == FakeModel.port
        if start.path.startswith("raise in rank") and start.path.endswith(str(self._rank)):
            raise ConfigError("these options cannot be honoured")
        if start.path == "exit" and self._rank == FAULTY_RANK:
            os._exit(3)

    def launch(self, plan: StepPlan) -> FakeStep:
        what = plan.decode_rows[0] if plan.decode_rows else ECHO
        if self._rank == FAULTY_RANK:
            if what == RAISE:
                raise ValueError("the model is on fire")
            if what == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == STOPPED:
                os.kill(os.getpid(), signal.SIGSTOP)
        if what in (RAISE, HANG, KILLED, STOPPED):
            threading.Event().wait()  # as in a collective operation whose peer never joins
        if what == SLOW:
            time.sleep(SLOW_SECONDS)
        return FakeStep(self._rank, plan)

    def close(self) -> None:
        # In one write: unbuffered print() writes its arguments one by one, and the ranks share a stream.
        os.write(1, f"the runner of rank {self._rank} is closed\n".encode())


if __name__ == "__main__":
    run(FakeModel())
