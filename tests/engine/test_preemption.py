"""The scheduler's policy, one rule per test: preemption, overlapped steps, and abort from every state."""

from collections.abc import Callable

import pytest

from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.core import EngineCore
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.plan import RowStep, StepResult
from nanovllm.state import BlockGroup

from .oracle import FakeExecutor
from .scheduler_steps import CONFIG, SCORE, STOP, TOKEN, add, make_scheduler, make_seq, schedule, step, update

# --- preemption -------------------------------------------------------------------------------------------------------


def test_out_of_blocks_the_newest_gives_way_and_comes_back_from_the_cache() -> None:
    scheduler = make_scheduler(groups=(BlockGroup(4),))
    old, new = make_seq(range(7), max_tokens=6), make_seq(range(30, 37), arrival=1, max_tokens=6)
    add(scheduler, old, new)
    step(scheduler)
    step(scheduler)
    assert scheduler.block_manager.num_available == 0
    plan = step(scheduler)
    assert plan.decode_rows == (old.row,) and plan.new_blocks[0].row == old.row
    assert new.status is SequenceStatus.WAITING and new.num_preemptions == 1 and scheduler.num_preemptions == 1
    assert new.completion_token_ids == [TOKEN, TOKEN], "nothing known is lost"
    while not old.finished:
        step(scheduler)
    (chunk,) = step(scheduler).row_steps
    assert chunk == RowStep(new.row, start=4, num_new=5, num_sampled=1)
    assert new.num_cached_tokens == 0, "what it found when it first ran"


def test_priority_decides_who_gives_way() -> None:
    scheduler = make_scheduler(groups=(BlockGroup(4),))
    humble, urgent = make_seq(range(7), priority=1), make_seq(range(30, 37), arrival=1)
    add(scheduler, humble, urgent)
    for _ in range(3):
        step(scheduler)
    assert humble.num_preemptions == 1 and urgent.status is SequenceStatus.RUNNING


def test_a_prefilling_sequence_gives_way_at_once_even_with_a_chunk_in_flight() -> None:
    scheduler = make_scheduler(groups=(BlockGroup(4),), max_num_batched_tokens=5)
    old, new = make_seq(range(4)), make_seq(range(30, 38), arrival=1, max_tokens=1)
    scheduler.add(old)
    for _ in range(4):
        step(scheduler)
    scheduler.add(new)
    in_flight = schedule(scheduler)
    assert in_flight.row_steps == (RowStep(new.row, 0, 4, num_sampled=0),)
    assert scheduler.block_manager.num_available == 0
    plan = schedule(scheduler)
    assert plan.decode_rows == (old.row,) and plan.new_blocks[0].row == old.row
    assert scheduler.waiting == [new] and new.num_computed_tokens == 0
    update(scheduler, in_flight)
    update(scheduler, plan)
    assert old.num_completion_tokens == 6 and new.num_completion_tokens == 0


def test_a_sequence_with_a_token_in_flight_rests_and_is_preempted_a_step_later() -> None:
    scheduler = make_scheduler(groups=(BlockGroup(2),))
    old, new = make_seq(range(4), max_tokens=4), make_seq(range(30, 33), arrival=1, max_tokens=4)
    add(scheduler, old, new)
    first = schedule(scheduler)
    assert scheduler.schedule() is None, "the old one needs a block, the new one's token is not known yet"
    assert new.status is SequenceStatus.RUNNING
    update(scheduler, first)
    plan = schedule(scheduler)
    assert plan.decode_rows == (old.row,) and new.status is SequenceStatus.WAITING
    assert new.completion_token_ids == [TOKEN]


def test_preempting_with_a_token_in_flight_is_impossible() -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(4))
    scheduler.add(seq)
    schedule(scheduler)
    with pytest.raises(AssertionError):
        scheduler.preempt(seq)


def test_a_chunk_of_an_earlier_life_changes_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = make_seq(range(20), prompt_logprobs=0)
    scheduler.add(seq)
    in_flight = schedule(scheduler)
    scheduler.preempt(seq)
    again = schedule(scheduler)
    update(scheduler, in_flight)
    assert seq.prompt_logprobs == [] and seq.num_cached_blocks == 0
    update(scheduler, again)
    assert len(seq.prompt_logprobs) == 8 and seq.num_cached_blocks == 2


# --- overlapped steps -------------------------------------------------------------------------------------------------


def test_a_late_token_of_an_ended_sequence_is_dropped() -> None:
    scheduler = make_scheduler()
    ends, goes_on = make_seq(range(5)), make_seq(range(30, 35), arrival=1)
    add(scheduler, ends, goes_on)
    first = schedule(scheduler)
    second = schedule(scheduler)
    row = ends.row
    scheduler.update(first, StepResult(tokens=[[STOP], [TOKEN]]))
    assert ends.finish_reason == "stop" and ends.stop_reason == STOP
    successor = make_seq([1], arrival=2)
    scheduler.add(successor)
    third = schedule(scheduler)
    assert successor.row == row
    assert scheduler.update(second, StepResult(tokens=[[5], [6]])) == []
    assert ends.completion_token_ids == [STOP] and goes_on.completion_token_ids == [TOKEN, 6]
    assert successor.completion_token_ids == []
    assert third.decode_rows == (goes_on.row,)


def test_the_last_token_is_waited_for_not_overshot() -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(4), max_tokens=2)
    scheduler.add(seq)
    first, second = schedule(scheduler), schedule(scheduler)
    assert scheduler.schedule() is None
    assert update(scheduler, first) == [] and update(scheduler, second) == [seq]
    assert seq.finish_reason == "length" and seq.num_completion_tokens == 2


def test_results_in_the_wrong_order_are_noticed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_seq(range(3)))
    schedule(scheduler)
    second = schedule(scheduler)
    with pytest.raises(AssertionError, match="order of their plans"):
        update(scheduler, second)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_core_returns_results_as_many_steps_late_as_it_is_deep(lazy: bool) -> None:
    scheduler = make_scheduler()
    core = EngineCore(scheduler, FakeExecutor(CONFIG, lazy=lazy), depth=1)
    seq = make_seq([1, 2], max_tokens=2)
    scheduler.add(seq)
    assert core.step() == [] and core.last_plan is None
    assert core.step() == [] and core.last_plan is not None and core.last_plan.row_steps
    assert core.has_work
    assert core.step() == [seq] and core.last_plan is not None and core.last_plan.decode_rows
    assert not core.has_work and core.step() == [] and core.last_plan is None


def test_the_core_does_not_stand_still_in_silence() -> None:
    scheduler = make_scheduler(groups=(BlockGroup(1),))
    scheduler.waiting.append(make_seq(range(5)))
    with pytest.raises(AssertionError, match="none of them can ever run"):
        EngineCore(scheduler, FakeExecutor(CONFIG), depth=0).step()


# --- abort, from every state ------------------------------------------------------------------------------------------


def reach_waiting(scheduler: Scheduler, seq: Sequence) -> None:
    assert seq in scheduler.waiting


def reach_prefilling(scheduler: Scheduler, seq: Sequence) -> None:
    step(scheduler)
    assert seq in scheduler.prefilling


def reach_decoding(scheduler: Scheduler, seq: Sequence) -> None:
    while seq not in scheduler.decoding:
        step(scheduler)


def reach_preempted(scheduler: Scheduler, seq: Sequence) -> None:
    reach_decoding(scheduler, seq)
    scheduler.preempt(seq)


@pytest.mark.parametrize("reach", [reach_waiting, reach_prefilling, reach_decoding, reach_preempted])
def test_abort(reach: Callable[[Scheduler, Sequence], None]) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = make_seq(range(12))
    scheduler.add(seq)
    reach(scheduler, seq)
    scheduler.abort(seq)
    check_scheduler(scheduler)
    assert seq.finished and (seq.finish_reason, seq.stop_reason) == ("abort", None)
    assert scheduler.num_unfinished == 0 and scheduler.schedule() is None
    assert scheduler.block_manager.num_available == CONFIG.num_blocks


def test_abort_with_a_token_in_flight() -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(5), logprobs=0)
    scheduler.add(seq)
    plan = schedule(scheduler)
    scheduler.abort(seq)
    assert scheduler.update(plan, StepResult(tokens=[[TOKEN]], logprobs={0: [SCORE]})) == []
    assert seq.completion_token_ids == [] and seq.logprobs == []
    check_scheduler(scheduler)


def test_abort_of_an_ended_sequence_is_harmless() -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(5), max_tokens=1)
    scheduler.add(seq)
    step(scheduler)
    scheduler.abort(seq)
    assert seq.finish_reason == "length"
