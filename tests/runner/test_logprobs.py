"""Logprobs of chosen tokens: value, rank, and the most likely other tokens."""

import torch

from nanovllm.runner.logprobs import score, score_rows

LOGPROBS = torch.tensor([[0.1, 0.5, 0.2, 0.15, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]]).log()


def test_the_chosen_comes_first_then_the_best() -> None:
    first, second = score(LOGPROBS, torch.tensor([3, 0]), 2).read()
    assert first.token_ids == (3, 1, 2)
    assert [round(value, 4) for value in torch.tensor(first.logprobs).exp().tolist()] == [0.15, 0.5, 0.2]
    assert first.rank == 3
    assert second.rank == 1  # nothing is more likely


def test_no_alternatives_and_more_than_there_are() -> None:
    alone, _ = score(LOGPROBS, torch.tensor([4, 0]), 0).read()
    assert (alone.token_ids, alone.rank) == ((4,), 5)
    everything, _ = score(LOGPROBS, torch.tensor([4, 0]), 100).read()
    assert everything.token_ids == (4, 1, 2, 3, 0, 4)


def test_rows_that_want_different_numbers() -> None:
    found = score_rows(LOGPROBS, torch.tensor([1, 1]), [(2, 3), (5, 0)]).read()
    assert {index: len(entries[0].token_ids) for index, entries in found.items()} == {2: 4, 5: 1}


def test_rows_that_name_their_alternatives() -> None:
    found = score_rows(LOGPROBS, torch.tensor([1, 3]), [(0, 2), (1, 1)], [(4, 0, 2), ()]).read()
    ((named,), (likely,)) = found[0], found[1]
    assert (named.token_ids, named.rank) == ((1, 4, 0, 2), 1)
    assert [round(value, 4) for value in torch.tensor(named.logprobs).exp().tolist()] == [0.5, 0.05, 0.1, 0.2]
    assert len(likely.token_ids) == 2 and likely.token_ids[0] == 3
