"""The published workload, token for token, and smaller ones made in the same way."""

import random

import pytest

from nanovllm.bench.workload import make_workload
from nanovllm.errors import ConfigError


def test_published_workload() -> None:
    workload = make_workload()
    assert len(workload.prompts) == len(workload.params) == 256
    assert workload.num_input_tokens == 142_827
    assert workload.num_output_tokens == 133_966


def test_drawn_as_published() -> None:
    """The same random numbers as in nano-vllm's benchmark, from the random module's global generator."""
    state = random.getstate()
    try:
        random.seed(0)
        prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
        max_tokens = [random.randint(100, 1024) for _ in range(256)]
    finally:
        random.setstate(state)
    workload = make_workload()
    assert workload.prompts == prompts
    assert [params.max_tokens for params in workload.params] == max_tokens
    assert {(params.temperature, params.ignore_eos) for params in workload.params} == {(0.6, True)}


def test_small_vocabulary_and_lengths_are_kept_to() -> None:
    workload = make_workload(num_seqs=50, input_len=(3, 5), output_len=(7, 20), max_tokens=9, vocab_size=11, seed=1)
    assert {len(prompt) for prompt in workload.prompts} == {3, 4, 5}
    assert {token for prompt in workload.prompts for token in prompt} == set(range(11))
    assert set(workload.output_lens) == {7, 8, 9}
    assert workload.first_tokens(2).output_lens == [2] * 50
    assert make_workload(num_seqs=50, input_len=(3, 5), seed=2).prompts != workload.prompts


def test_staggered_batch_takes_every_size() -> None:
    workload = make_workload()
    staggered = workload.staggered()
    assert staggered.prompts == workload.prompts
    assert sorted(staggered.output_lens) == list(range(2, 258))
    assert all(cut <= full for cut, full in zip(staggered.output_lens, workload.output_lens, strict=True))
    short = make_workload(num_seqs=4, output_len=(3, 3)).staggered()
    assert sorted(short.output_lens) == [2, 3, 3, 3]


def test_request_that_would_be_cut_short_is_refused() -> None:
    workload = make_workload(num_seqs=1, input_len=(30, 30), output_len=(10, 10))
    workload.check_fits(40)
    with pytest.raises(ConfigError, match="max_model_len=39: the longest request of this workload needs 40 tokens"):
        workload.check_fits(39)
