"""The scheduler's policy, one rule per test: which requests are admitted, what a step computes, what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestError
from nanovllm.plan import NewBlocks, RowStep
from nanovllm.state import BlockGroup

from .oracle import Harness, table_of
from .oracle_model import Request
from .scheduler_steps import CONFIG, STOP, TOKEN, add, make_scheduler, make_seq, schedule, step, update

# --- admission --------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan() -> None:
    assert make_scheduler().schedule() is None


def test_the_first_step_carries_all_the_device_needs() -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(5), temperature=0.5)
    seq.seed, seq.bad_words = 17, ((1, 2),)
    scheduler.add(seq)
    plan = schedule(scheduler)
    (new,) = plan.new_rows
    assert (new.row, new.token_ids, new.num_prompt_tokens) == (seq.row, (0, 1, 2, 3, 4), 5)
    assert (new.block_tables, new.params, new.seed) == ((tuple(table_of(seq)),), seq.params, 17)
    assert (new.stop_token_ids, new.bad_words) == ((STOP,), ((1, 2),))
    assert plan.row_steps == (RowStep(seq.row, start=0, num_new=5, num_sampled=1),)
    assert plan.decode_rows == () and plan.new_blocks == () and plan.num_tokens == 5


def test_a_long_prompt_is_cut_to_the_budget_and_samples_with_its_last_chunk() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = make_seq(range(20))
    scheduler.add(seq)
    chunks = [step(scheduler).row_steps for _ in range(3)]
    assert chunks == [
        (RowStep(seq.row, 0, 8, num_sampled=0),),
        (RowStep(seq.row, 8, 8, num_sampled=0),),
        (RowStep(seq.row, 16, 4, num_sampled=1),),
    ]
    assert seq.completion_token_ids == [TOKEN]


def test_decodes_come_first_and_chunks_fill_the_rest_of_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    decoding, long, short = make_seq(range(4)), make_seq(range(30, 40), arrival=1), make_seq(range(50, 54), arrival=2)
    scheduler.add(decoding)
    step(scheduler)
    add(scheduler, long, short)
    plan = step(scheduler)
    assert plan.decode_rows == (decoding.row,)
    assert plan.row_steps == (RowStep(long.row, 0, 7, num_sampled=0),)
    plan = step(scheduler)
    assert plan.decode_rows == (decoding.row,)
    assert plan.row_steps == (RowStep(long.row, 7, 3, num_sampled=1), RowStep(short.row, 0, 4, num_sampled=1))
    assert plan.num_tokens == 8
    assert step(scheduler).decode_rows == (decoding.row, long.row, short.row)


def test_no_more_rows_than_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    seqs = [make_seq([i] * 3, arrival=i, max_tokens=2) for i in range(3)]
    add(scheduler, *seqs)
    assert len(step(scheduler).new_rows) == 2
    assert step(scheduler).new_rows == ()
    assert seqs[0].finished and seqs[1].finished
    plan = step(scheduler)
    assert [new.token_ids for new in plan.new_rows] == [(2, 2, 2)] and 1 <= seqs[2].row <= 2


def test_a_request_too_large_for_now_is_not_overtaken() -> None:
    scheduler = make_scheduler(groups=(BlockGroup(6),))
    running, large, small = make_seq(range(12)), make_seq(range(30, 46), arrival=1), make_seq([7], arrival=2)
    scheduler.add(running)
    step(scheduler)
    add(scheduler, large, small)
    step(scheduler)
    assert scheduler.waiting == [large, small]


def test_priority_then_arrival_decide_who_is_admitted() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    usual, second, urgent = make_seq([1]), make_seq([2], arrival=1), make_seq([3], arrival=2, priority=-1)
    add(scheduler, second, usual, urgent)
    assert scheduler.waiting == [urgent, usual, second]
    assert schedule(scheduler).new_rows[0].token_ids == (3,)


# --- the unchanged step -----------------------------------------------------------------------------------------------


def test_an_unchanged_decode_step_is_the_very_same_plan() -> None:
    scheduler = make_scheduler(block_size=16)
    add(scheduler, make_seq([1] * 3, max_tokens=20), make_seq([2] * 3, arrival=1, max_tokens=20))
    step(scheduler)
    first = step(scheduler)
    assert all(step(scheduler) is first for _ in range(5))
    scheduler.add(make_seq([3], arrival=2))
    assert step(scheduler).row_steps
    grown = step(scheduler)
    assert len(grown.decode_rows) == 3 and step(scheduler) is grown


def test_a_step_with_new_blocks_is_not_repeated_but_its_rows_are() -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(4))
    scheduler.add(seq)
    step(scheduler)
    plan = step(scheduler)
    assert plan.new_blocks == (NewBlocks(seq.row, index=1, blocks=(table_of(seq)[1],)),)
    steady = step(scheduler)
    assert steady.new_blocks == () and steady.decode_rows is plan.decode_rows
    assert step(scheduler) is steady
    step(scheduler)
    more = step(scheduler)
    assert more.new_blocks and more.decode_rows is plan.decode_rows


def test_a_queue_without_a_free_row_does_not_disturb() -> None:
    scheduler = make_scheduler(max_num_seqs=1, block_size=16)
    scheduler.add(make_seq([1]))
    step(scheduler)
    plan = step(scheduler)
    scheduler.add(make_seq([2], arrival=1))
    assert step(scheduler) is plan


@pytest.mark.parametrize("leave", [Scheduler.abort, Scheduler.preempt])
def test_the_steady_plan_ends_with_one_of_its_sequences(leave: Callable[[Scheduler, Sequence], None]) -> None:
    scheduler = make_scheduler(block_size=16)
    stays, goes = make_seq([1] * 3), make_seq([2] * 3, arrival=1)
    add(scheduler, stays, goes)
    for _ in range(3):
        step(scheduler)
    leave(scheduler, goes)
    assert step(scheduler).decode_rows == (stays.row,)


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_a_full_prompt_hit_computes_one_token() -> None:
    scheduler = make_scheduler()
    first, again = make_seq(range(9), max_tokens=1), make_seq(range(9), arrival=1)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(again)
    assert step(scheduler).row_steps == (RowStep(again.row, start=8, num_new=1, num_sampled=1),)
    assert again.num_cached_tokens == 8


def test_a_prompt_of_whole_blocks_computes_its_last_block_again() -> None:
    scheduler = make_scheduler()
    first, again = make_seq(range(8), max_tokens=1), make_seq(range(8), arrival=1)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(again)
    assert step(scheduler).row_steps == (RowStep(again.row, start=4, num_new=4, num_sampled=1),)


def test_two_sequences_of_one_step_compute_the_same_prefix_each_for_itself() -> None:
    scheduler = make_scheduler()
    first, second, third = (make_seq(range(9), arrival=i) for i in range(3))
    add(scheduler, first, second)
    assert [chunk.start for chunk in step(scheduler).row_steps] == [0, 0]
    assert not set(table_of(first)) & set(table_of(second))
    scheduler.add(third)
    assert [chunk.start for chunk in step(scheduler).row_steps] == [8]
    assert table_of(third)[:2] == table_of(first)[:2]


def test_a_block_is_shared_only_after_its_result_has_come() -> None:
    scheduler = make_scheduler()
    first, second = make_seq(range(9)), make_seq(range(9), arrival=1)
    scheduler.add(first)
    in_flight = schedule(scheduler)
    scheduler.add(second)
    assert schedule(scheduler).row_steps[0].start == 0
    update(scheduler, in_flight)
    assert not set(table_of(first)) & set(table_of(second))


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    scheduler = make_scheduler()
    first = make_seq(range(4), max_tokens=6)
    scheduler.add(first)
    while not first.finished:
        step(scheduler)
    turn = make_seq([*first.token_ids, 1], arrival=1)
    scheduler.add(turn)
    assert step(scheduler).row_steps[0].start == 8, "of 10 tokens 9 were computed, and 8 of them fill blocks"


def test_without_prefix_caching_a_full_block_needs_no_look() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    seq = make_seq(range(9))
    scheduler.add(seq)
    step(scheduler)
    assert seq.check_at == seq.max_num_tokens


# --- prompt logprobs --------------------------------------------------------------------------------------------------


def test_prompt_logprobs_skip_the_cache_read() -> None:
    scheduler = make_scheduler()
    first, scored = make_seq(range(9), max_tokens=1), make_seq(range(9), arrival=1, prompt_logprobs=2)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(scored)
    assert step(scheduler).row_steps == (RowStep(scored.row, 0, 9, num_sampled=1, num_prompt_logprobs=2),)
    assert scored.num_cached_tokens == 0 and len(scored.prompt_logprobs) == 8


def test_a_preempted_sequence_is_not_scored_twice() -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(9), prompt_logprobs=0)
    scheduler.add(seq)
    step(scheduler)
    scheduler.preempt(seq)
    (chunk,) = step(scheduler).row_steps
    assert chunk == RowStep(seq.row, start=8, num_new=2, num_sampled=1, num_prompt_logprobs=None)
    assert len(seq.prompt_logprobs) == 8


def test_a_sequence_preempted_while_being_scored_is_scored_anew() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    seq = make_seq(range(9), prompt_logprobs=0)
    scheduler.add(seq)
    step(scheduler)
    assert len(seq.prompt_logprobs) == 6
    scheduler.preempt(seq)
    assert seq.prompt_logprobs == []
    assert step(scheduler).row_steps[0] == RowStep(seq.row, 0, 6, num_sampled=0, num_prompt_logprobs=0)
    step(scheduler)
    assert len(seq.prompt_logprobs) == 8


# --- several completions ----------------------------------------------------------------------------------------------


def family(num_prompt_tokens: int = 9) -> tuple[Sequence, Sequence, Sequence]:
    leader, second, third = (make_seq(range(num_prompt_tokens), max_tokens=3) for _ in range(3))
    second.index, third.index = 1, 2
    leader.followers = [second, third]
    return leader, second, third


def test_followers_wait_for_the_prompt_and_share_its_blocks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    leader, second, third = family()
    scheduler.add(leader)
    step(scheduler)
    assert scheduler.waiting == []
    step(scheduler)
    assert scheduler.waiting == [second, third]
    plan = step(scheduler)
    assert [(chunk.row, chunk.start, chunk.num_new) for chunk in plan.row_steps] == [
        (second.row, 8, 1),
        (third.row, 8, 1),
    ]
    assert table_of(leader)[:2] == table_of(second)[:2] == table_of(third)[:2]
    assert second.num_cached_tokens == third.num_cached_tokens == 8


def test_followers_outlive_an_aborted_leader() -> None:
    scheduler = make_scheduler()
    leader, second, third = family()
    scheduler.add(leader)
    scheduler.abort(leader)
    assert scheduler.waiting == [second, third]


def test_followers_stay_when_their_leader_is_preempted() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    leader, second, third = family()
    scheduler.add(leader)
    step(scheduler)
    scheduler.preempt(leader)
    assert scheduler.waiting == [leader] and leader.followers == [second, third]


def test_a_follower_aborted_while_it_hangs_never_runs() -> None:
    scheduler = make_scheduler()
    leader, second, third = family()
    scheduler.add(leader)
    scheduler.abort(second)
    step(scheduler)
    assert second.finish_reason == "abort" and scheduler.waiting == [third]


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_prompt_tokens, max_tokens, parts",
    [
        (0, 1, ["empty", "at least one token"]),
        (32, 1, ["32 tokens", "max_model_len=32", "shorten the prompt or raise max_model_len"]),
        (40, 1, ["40 tokens", "max_model_len=32"]),
        (10, 8, ["10 tokens", "up to 8 new", "need 5 KV blocks of 4 tokens", "there are 4", "lower max_tokens"]),
        (18, 1, ["18 tokens", "up to 1 new", "need 5 KV blocks", "there are 4"]),
        (17, 0, ["17 tokens", "up to 1 new", "need 5 KV blocks", "shorten the prompt"]),
    ],
)
def test_what_can_never_run_is_refused_with_the_number_that_fails(
    num_prompt_tokens: int, max_tokens: int, parts: list[str]
) -> None:
    scheduler = make_scheduler(max_model_len=32, groups=(BlockGroup(4),))
    with pytest.raises(RequestError) as error:
        scheduler.add(make_seq(range(num_prompt_tokens), max_tokens=max_tokens))
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert isinstance(error.value, ValueError)
    assert scheduler.num_unfinished == 0
    check_scheduler(scheduler)


@pytest.mark.parametrize("num_prompt_tokens, max_tokens", [(1, 16), (16, 1), (10, 7), (1, None), (16, None)])
def test_what_just_fits_runs_to_its_end(num_prompt_tokens: int, max_tokens: int | None) -> None:
    """16 slots hold 17 tokens: the last one is never computed."""
    harness = Harness(replace(CONFIG, groups=(BlockGroup(4),), max_model_len=32))
    assert harness.add(Request(prompt=(1,) * num_prompt_tokens, max_tokens=max_tokens))
    harness.run_to_end()
    assert len(harness.sequences[0][0].token_ids) == 17


# --- check() itself can fail ------------------------------------------------------------------------------------------


def test_check_sees_a_lost_row() -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(4))
    scheduler.add(seq)
    step(scheduler)
    scheduler.decoding.remove(seq)
    with pytest.raises(AssertionError, match="row"):
        check_scheduler(scheduler)


def test_check_sees_a_queue_out_of_order() -> None:
    scheduler = make_scheduler()
    scheduler.waiting = [make_seq([1], arrival=1), make_seq([1], arrival=0)]
    with pytest.raises(AssertionError, match="order"):
        check_scheduler(scheduler)
