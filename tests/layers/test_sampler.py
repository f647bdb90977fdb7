"""Sampled tokens have the distribution that transformers' warpers give, and the noise is uniform and independent."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm.layers.noise import gumbel, noise_keys
from nanovllm.layers.sampler import SamplingRows, sample
from nanovllm.layers.sampler_cuts import NUM_CANDIDATES, CutRows
from tests.helpers import UNLIKELY, assert_distributed

SIBLING = 0x9E3779B97F4A7C15 - 2**64  # difference between the seeds of a request's completions


def make_rows(
    count: int,
    *,
    seed: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    vocab_size: int,
) -> SamplingRows:
    everyone = torch.arange(count)
    is_cut = top_k is not None or top_p < 1.0 or min_p > 0.0
    cut = CutRows(
        rows=everyone,
        top_k=torch.full((count,), top_k or vocab_size),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
    )
    return SamplingRows(
        greedy=everyone if temperature == 0.0 else None,
        plain=everyone if temperature and not is_cut else None,
        cut=cut if temperature and is_cut else None,
        temperature=torch.full((count,), temperature or 1.0),
        seed=seed,
    )


def draw(logits: torch.Tensor, count: int, *, first_seed: int = 1, **settings: Any) -> np.ndarray:
    """`count` tokens for the same [vocab] logits: 8 positions of each of count / 8 seeds."""
    seeds = first_seed + torch.arange(count) // 8
    rows = make_rows(count, seed=seeds, vocab_size=len(logits), **settings)
    return sample(logits.expand(count, -1), rows, torch.arange(count) % 8).numpy()


def expected(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution of transformers, [vocab]."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].double())[0].softmax(dim=-1).numpy()


LOGITS = torch.tensor([2.0, 1.5, 1.4, 0.9, 0.5, 0.0, -0.3, -0.4, -1.0, -1.5, -2.0, -3.0])

CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_k": 12},
    {"top_p": 0.6},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 4, "min_p": 0.5},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.15},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_small_vocabulary(cut: dict[str, Any], temperature: float) -> None:
    tokens = draw(LOGITS, 8000, temperature=temperature, **cut)
    assert_distributed(tokens, expected(LOGITS, temperature=temperature, **cut))


@pytest.mark.parametrize(
    "cut",
    [{}, {"top_k": 100}, {"top_k": 700}, {"top_p": 0.2}, {"top_p": 0.9}, {"min_p": 0.6}, {"top_k": 900, "top_p": 0.8}],
    ids=str,
)
def test_flat_distribution_over_more_tokens_than_are_looked_at_first(cut: dict[str, Any]) -> None:
    vocab_size = 1500
    assert vocab_size > 2 * NUM_CANDIDATES
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 0.2
    wanted = expected(logits, **cut)
    tokens = np.concatenate([draw(logits, 2000, first_seed=1000 * i, **cut) for i in range(6)])
    assert_distributed(tokens, wanted)
    if (wanted > 0).sum() > NUM_CANDIDATES:
        assert len(np.unique(tokens)) > NUM_CANDIDATES


def test_tokens_tied_with_the_last_of_top_k_stay() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    assert_distributed(draw(logits, 4000, top_k=2), expected(logits, top_k=2))
    flat = torch.zeros(1500)
    assert_distributed(draw(flat, 4000, top_k=10), expected(flat, top_k=10))


def test_tokens_tied_with_the_last_of_top_p_stay() -> None:
    logits = torch.tensor([3.0, 1.0, 0.0, 1.0, 1.0])  # 3.0 alone has 0.68 of the mass, with one 1.0 it has 0.77
    four = torch.tensor([3.0, 1.0, float("-inf"), 1.0, 1.0])
    assert_distributed(draw(logits, 4000, top_p=0.7), expected(four))
    assert set(draw(logits, 4000, top_p=0.6)) == {0}
    # all tokens are tied, also those after the first candidates, and also after top-k
    flat = torch.zeros(1500)
    for cut in ({"top_p": 0.1}, {"top_k": 10, "top_p": 0.5}):
        tokens = np.concatenate([draw(flat, 4000, first_seed=1000 * i, **cut) for i in range(2)])  # type: ignore[arg-type]
        assert_distributed(tokens, expected(flat))


def test_top_k_1_and_greedy_are_the_argmax() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    for settings in ({"top_k": 1}, {"temperature": 0.0}, {"top_p": 1e-6}, {"min_p": 1.0}):
        rows = make_rows(64, seed=torch.arange(64), vocab_size=300, **settings)
        assert torch.equal(sample(logits, rows, torch.zeros(64, dtype=torch.int64)), logits.argmax(dim=-1))


def test_a_cut_that_cuts_nothing_draws_what_no_cut_draws() -> None:
    plain, cut = draw(LOGITS, 512), draw(LOGITS, 512, top_k=len(LOGITS))
    assert (plain == cut).all()


def test_a_row_draws_alone_what_it_draws_in_a_mixed_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 1200, generator=generator)
    settings = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.99}, {"temperature": 1.5}, {"min_p": 0.01}]
    seeds, positions = torch.arange(6) * 7 - 3, torch.arange(6) * 100
    alone = [
        make_rows(1, seed=seeds[i : i + 1], vocab_size=1200, **chosen)  # type: ignore[arg-type]
        for i, chosen in enumerate(settings)
    ]
    one_by_one = [sample(logits[i : i + 1], rows, positions[i : i + 1]).item() for i, rows in enumerate(alone)]

    def column(name: str, of: list[Any]) -> torch.Tensor:
        return torch.cat([getattr(rows, name) for rows in of])

    cuts = [rows.cut for rows in alone if rows.cut is not None]
    batch = SamplingRows(
        greedy=torch.tensor([0]),
        plain=torch.tensor([1, 4]),
        cut=CutRows(torch.tensor([2, 3, 5]), *(column(name, cuts) for name in ("top_k", "top_p", "min_p"))),
        **{name: column(name, alone) for name in ("temperature", "seed")},
    )
    assert sample(logits, batch, positions).tolist() == one_by_one


# --- the noise --------------------------------------------------------------------------------------------------------


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> np.ndarray:
    """The noise as numbers that should be uniform in (0, 1): [rows, tokens]."""
    noise = gumbel(noise_keys(seeds, positions), token_ids).double()
    return (-(-noise).exp()).exp().numpy()


ALONG = {
    "tokens": uniforms(torch.tensor([5]), torch.tensor([9]), torch.arange(60000)),
    "positions": uniforms(torch.full((60000,), 5), torch.arange(60000), torch.tensor([17])),
    "seeds": uniforms(torch.arange(60000), torch.full((60000,), 9), torch.tensor([17])),
    "large seeds": uniforms(torch.arange(60000) << 40, torch.full((60000,), 9), torch.tensor([17])),
    "siblings": uniforms(torch.arange(60000) * SIBLING, torch.full((60000,), 9), torch.tensor([17])),
}


@pytest.mark.parametrize("axis", ALONG)
def test_noise_is_uniform_and_without_memory(axis: str) -> None:
    values = ALONG[axis].reshape(-1)
    assert ((values > 0) & (values < 1)).all()
    assert stats.kstest(values, "uniform").pvalue > UNLIKELY
    for lag in (1, 2, 8, 64):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 4 / len(values) ** 0.5


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (SIBLING, 0), (2**32, 0)], ids=str)
def test_draws_of_neighbouring_seeds_and_positions_are_independent(step: tuple[int, int]) -> None:
    """Counts of token a here and token b at the next position, or with the next seed: all 16 pairs equally often."""
    count = 16000
    here = torch.arange(count) * 3, torch.arange(count) % 50
    there = here[0] + step[0], here[1] + step[1]
    draws = []
    for seeds, positions in (here, there):
        rows = make_rows(count, seed=seeds, vocab_size=4)
        draws.append(sample(torch.zeros(count, 4), rows, positions).numpy())
    table = np.histogram2d(*draws, bins=4)[0]
    assert stats.chisquare(table.reshape(-1)).pvalue > UNLIKELY


def test_a_large_vocabulary_is_decided_by_noise_and_not_by_ties() -> None:
    noise = torch.cat(
        [gumbel(noise_keys(torch.full((10,), i), torch.arange(10)), torch.arange(131072)) for i in range(20)]
    )
    best = noise.max(dim=-1, keepdim=True).values
    assert (noise == best).sum() == len(noise)
