"""A step may give a row several tokens: everything that ends or marks a sequence is found in the middle of them."""

from collections.abc import Sequence as Seq

import pytest

from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.growing_text import GrowingText
from nanovllm.engine.guide import step_masks
from nanovllm.engine.request import Completion
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.plan import StepResult, TokenLogprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER

from .oracle import table_of
from .scheduler_steps import STOP, make_scheduler, make_seq, schedule, step


def feed(scheduler: Scheduler, *tokens: list[int]) -> list[Sequence]:
    """Schedule a step and answer it with these lists of tokens, one for each sampled row."""
    ended = scheduler.update(schedule(scheduler), StepResult(tokens=list(tokens)))
    check_scheduler(scheduler)
    return ended


def decoding(scheduler: Scheduler, seq: Sequence) -> Sequence:
    scheduler.add(seq)
    step(scheduler, token=1)
    return seq


@pytest.mark.parametrize("decodes", [False, True])
def test_a_stop_token_in_the_middle_ends_the_sequence_there(decodes: bool) -> None:
    scheduler = make_scheduler()
    seq = make_seq(range(5), max_tokens=20)
    scheduler.add(seq)
    before = []
    if decodes:
        step(scheduler, token=1)
        before = [1]
    assert feed(scheduler, [5, STOP, 7]) == [seq]
    assert seq.completion_token_ids == [*before, 5, STOP]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", STOP)


@pytest.mark.parametrize("num_given", [3, 4, 5, 9])
def test_a_sequence_never_gets_longer_than_its_limit(num_given: int) -> None:
    scheduler = make_scheduler()
    seq = decoding(scheduler, make_seq(range(6), max_tokens=4))
    ended = feed(scheduler, list(range(10, 10 + num_given)))
    assert seq.num_tokens == 10 and seq.completion_token_ids == [1, 10, 11, 12]
    assert ended == [seq] and seq.finish_reason == "length"


def test_a_stop_token_beyond_the_limit_does_not_count() -> None:
    scheduler = make_scheduler()
    seq = decoding(scheduler, make_seq(range(6), max_tokens=3))
    feed(scheduler, [5, 6, STOP])
    assert (seq.completion_token_ids, seq.finish_reason, seq.stop_reason) == ([1, 5, 6], "length", None)


def test_the_next_step_continues_after_all_of_them() -> None:
    scheduler = make_scheduler(block_size=16)
    seq = decoding(scheduler, make_seq(range(5), max_tokens=20))
    feed(scheduler, [5, 6, 7])
    assert seq.num_computed_tokens == seq.num_tokens - 1 == 8
    feed(scheduler, [8])
    assert seq.completion_token_ids == [1, 5, 6, 7, 8] and seq.num_computed_tokens == 9


def test_blocks_filled_in_the_middle_are_found_by_the_next_turn() -> None:
    scheduler = make_scheduler(block_size=4)
    seq = make_seq(range(6), max_tokens=20)
    scheduler.add(seq)
    feed(scheduler, [6, 7, 8])
    assert seq.num_cached_blocks == 2, "of 9 tokens 8 are computed"
    turn = make_seq([*seq.token_ids, 1], arrival=1)
    scheduler.add(turn)
    schedule(scheduler)
    assert table_of(turn)[:2] == table_of(seq)[:2] and turn.num_cached_tokens == 8


def test_what_comes_after_the_end_is_not_in_the_prefix_cache() -> None:
    scheduler = make_scheduler(block_size=4)
    seq = make_seq(range(6), max_tokens=20)
    scheduler.add(seq)
    feed(scheduler, [6, STOP, 8, 9, 10])
    turn = make_seq([*range(7), STOP, 8, 9, 10, 11, 12], arrival=1)
    scheduler.add(turn)
    schedule(scheduler)
    assert turn.num_cached_tokens == 4


def test_logprobs_are_cut_with_their_tokens() -> None:
    scheduler = make_scheduler()
    seq, other = make_seq(range(5), logprobs=0), make_seq(range(20, 25), arrival=1, logprobs=0)
    scheduler.add(seq)
    scheduler.add(other)
    scores = [TokenLogprobs((token,), (-float(token),), 1) for token in range(6)]
    result = StepResult(tokens=[[1, STOP, 3], [4, 5]], logprobs={0: scores[1:4], 1: scores[4:6]})
    assert scheduler.update(schedule(scheduler), result) == [seq]
    assert seq.logprobs == scores[1:3] and other.logprobs == scores[4:6]


class RecordingGuide:
    is_over = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def mask_after(self, new_tokens: Seq[int]) -> bytes | None:
        self.tokens += new_tokens
        return None if 9 in self.tokens else b"\xff"


def test_a_grammar_follows_every_one_of_them() -> None:
    scheduler = make_scheduler(block_size=16)
    seq = make_seq(range(5), max_tokens=20)
    guide = seq.guide = RecordingGuide()
    scheduler.add(seq)
    feed(scheduler, [5, 6, 7])
    plan = schedule(scheduler)
    assert step_masks(scheduler) == ({seq.row: [b"\xff"]}, []) and guide.tokens == [5, 6, 7]
    scheduler.update(plan, StepResult(tokens=[[8, 9]]))
    plan = schedule(scheduler)
    assert step_masks(scheduler) == ({}, [seq]) and guide.tokens == [5, 6, 7, 8, 9]
    assert seq.finish_reason == "error"


# --- stop strings -----------------------------------------------------------------------------------------------------


def finish(seq: Sequence, reason: str, stop_reason: str | int | None) -> None:
    seq.status, seq.finish_reason, seq.stop_reason = SequenceStatus.FINISHED, reason, stop_reason


def text_completion(tokenizer: Tokenizer, text: str, **settings: object) -> Completion:
    """A completion that is given the whole of `text` in one step."""
    seq = Sequence("0", [5], SamplingParams(logprobs=0, **settings), max_num_tokens=100)
    completion = Completion(seq, tokenizer)
    completion.growing = GrowingText(seq, tokenizer, finish=finish)
    seq.status = SequenceStatus.RUNNING
    seq.token_ids += tokenizer.encode(text, add_special_tokens=False)
    seq.logprobs = [TokenLogprobs((token,), (-1.0,), 1) for token in seq.completion_token_ids]
    return completion


@pytest.mark.parametrize("last", [None, "length", "stop"])
def test_a_stop_string_in_the_middle_cuts_tokens_and_logprobs(last: str | None) -> None:
    """Also where the later tokens, which are dropped, had ended the sequence in another way."""
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    completion = text_completion(tokenizer, "one two three four", stop=["two"])
    seq = completion.seq
    num_given = seq.num_completion_tokens
    if last is not None:
        finish(seq, last, 7 if last == "stop" else None)
    assert completion.growing is not None and completion.growing.read_new_tokens()
    assert seq.finished
    output = completion.output(frozenset())
    assert output.text == "one " and (output.finish_reason, output.stop_reason) == ("stop", "two")
    assert output.logprobs is not None and len(output.token_ids) == len(output.logprobs) < num_given
    assert tokenizer.decode(list(output.token_ids)).startswith("one two")
    assert not completion.growing.read_new_tokens(), "nothing is left to be read"
