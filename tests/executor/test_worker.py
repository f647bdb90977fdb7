"""One worker that runs in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nanovllm.config import Config
from nanovllm.distributed.group import Rank
from nanovllm.executor.messages import Answer, Failed, Launch, Open, Opened, Ready, Sample, Start, Stop, Wait
from nanovllm.executor.worker import Worker
from nanovllm.plan import NewBlocks, RowStep, StepPlan, StepResult


class Recorder:
    """In place of a model and its runner: records what it is given."""

    port = 7
    num_blocks = 3
    startup_seconds = {"weights": 0.5}

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.masks: list[Mapping[int, Sequence[bytes]]] = []
        self.closed = False

    def open_store(self, host: str) -> "Recorder":
        return self

    def build(self, start: Start, store: Any) -> "Recorder":
        return self

    def launch(self, plan: StepPlan) -> "RecordedStep":
        self.plans.append(plan)
        return RecordedStep(self, len(self.plans))

    def close(self) -> None:
        self.closed = True


class RecordedStep:
    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number

    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        self._recorder.masks.append(masks)

    def wait(self) -> StepResult:
        return StepResult(tokens=[[self._number]], pooled={2: [0.5]})


def obey(worker: Worker, *commands: object) -> list[Any]:
    return [worker.obey(msgspec.msgpack.encode(command)) for command in commands]


def start(rank: Rank) -> Start:
    config = Config(tensor_parallel_size=rank.tensor_parallel_size)
    return Start(rank, 1, "127.0.0.1", 7, config, "somewhere", 1)


def started(rank: Rank | None = None) -> tuple[Worker, Recorder]:
    recorder = Recorder()
    worker = Worker(recorder)
    replies = obey(worker, Open("127.0.0.1"), start(rank or Rank()))
    assert replies == [Opened(7), Ready(3, {"weights": 0.5})]
    return worker, recorder


def test_an_unchanged_step_is_the_very_same_plan() -> None:
    worker, recorder = started()
    unchanged = Launch(StepPlan(decode_rows=(300, 400)))
    more_blocks = Launch(StepPlan(decode_rows=(300, 400), new_blocks=(NewBlocks(300, 1, (5,)),)))
    other_rows = Launch(StepPlan(decode_rows=(300, 401)))
    obey(worker, unchanged, unchanged, Wait(1, 0), unchanged, more_blocks, other_rows)
    first, second, third, fourth, fifth = recorder.plans
    assert first is second is third
    assert fourth == more_blocks.plan and fourth.decode_rows is first.decode_rows
    assert fifth == other_rows.plan


def test_a_result_can_be_that_of_an_earlier_plan_and_those_before_it_are_dropped() -> None:
    worker, _ = started()
    plan = Launch(StepPlan(decode_rows=(1,)))
    replies = obey(worker, plan, plan, plan, plan, Wait(1, 2), Wait(2, 0), plan, Wait(3, 0))
    assert [reply.result.tokens for reply in replies if reply is not None] == [[[2]], [[4]], [[5]]]


def test_only_one_rank_sends_what_was_computed_and_all_agree_on_its_checksum() -> None:
    pooling = RowStep(2, 0, 5, pooling="last")
    commands = (Launch(StepPlan(decode_rows=(1,), row_steps=(pooling,))), Wait(1, 0))
    answers = []
    for rank in range(2):
        worker, _ = started(Rank(index=rank, tensor_parallel_size=2))
        answers += obey(worker, *commands)[1:]
    step, other_step = answers
    assert step.result == StepResult(tokens=[[1]], pooled={2: [0.5]})
    assert other_step.result is None
    assert step.checksum == other_step.checksum != 0


def test_masks_and_the_end() -> None:
    worker, recorder = started()
    guided = Launch(StepPlan(decode_rows=(1,), guided_rows=(1,)))
    assert obey(worker, guided, Sample({1: [b"\xff"]}), Wait(1, 0))[:2] == [None, None]
    assert recorder.masks == [{1: [b"\xff"]}]
    assert obey(worker, Stop()) == [None]
    assert recorder.closed and worker.stopped


def test_what_goes_wrong_is_answered() -> None:
    worker, _ = started()
    (reply,) = obey(worker, Wait(1, 0))
    assert isinstance(reply, Failed) and worker.stopped
    assert reply.kind == "IndexError" and "in _wait" in reply.traceback
    assert isinstance(Worker(Recorder()).obey(b"\xc1"), Failed)
    assert not isinstance(reply, Answer)
