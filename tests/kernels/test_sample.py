"""The kernels sample the tokens of layers.sampler, and apply top-k and top-p as a sort in float64 does."""

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.sampling import thresholds as kernels
from nanovllm.kernels.sampling.sample import sample
from nanovllm.kernels.sampling.thresholds import cut_thresholds
from nanovllm.layers import sampler
from nanovllm.layers.sampler_cuts import CutRows
from tests.helpers import assert_distributed
from tests.kernels.support import DEVICE

INT64_SEEDS = torch.tensor([0, 1, -1, 2**40 + 5, -(2**63), 2**63 - 1, 7, 123456789])
MAX_LEN = 64


@dataclass
class Table:
    """A request table whose row i belongs to batch entry i - 1, unless `rows` says otherwise."""

    tokens: Tensor
    length: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_low: Tensor
    seed_high: Tensor


def make_table(count: int, *, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0) -> Table:
    def column(value: Any, dtype: torch.dtype) -> Tensor:
        values = torch.as_tensor(value, dtype=dtype).expand(count)
        return torch.cat([torch.full((1,), -1, dtype=dtype), values])  # row 0 must not be used

    low, high = INT64_SEEDS[torch.arange(count + 1) % len(INT64_SEEDS)].view(torch.int32).reshape(-1, 2).T.contiguous()
    table = Table(
        tokens=torch.full((count + 1, MAX_LEN), -1, dtype=torch.int32),
        length=(torch.arange(count + 1) * 7 % (MAX_LEN - 1)).int(),
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seed_low=low,
        seed_high=high,
    )
    return Table(**{field.name: getattr(table, field.name).to(DEVICE) for field in fields(table)})


def make_logits(count: int, vocab_size: int, dtype: torch.dtype, *, spread: float = 2.5) -> Tensor:
    """Rows of a wider matrix, as from an lm_head with a padded vocabulary."""
    wide = torch.randn(count, vocab_size + 13, generator=torch.Generator().manual_seed(vocab_size)) * spread
    wide[:, vocab_size:] = 100.0
    return wide.to(DEVICE, dtype)[:, :vocab_size]


def all_rows(logits: Tensor) -> Tensor:
    return torch.arange(1, len(logits) + 1, dtype=torch.int32, device=DEVICE)


def thresholds_of(logits: Tensor, table: Table, rows: Tensor) -> Tensor:
    out = torch.full((len(logits),), float("nan"), device=DEVICE)
    cut_thresholds(
        logits,
        rows=rows,
        temperature=table.temperature,
        top_k=table.top_k,
        top_p=table.top_p,
        min_p=table.min_p,
        out=out,
    )
    return out


def draw(
    logits: Tensor,
    table: Table,
    rows: Tensor,
    *,
    thresholds: Tensor | None = None,
) -> Tensor:
    """Run the kernel and return `out`, -1 where it wrote nothing."""
    out = torch.full((len(logits),), -1, dtype=torch.int32, device=DEVICE)
    scratch = torch.zeros(len(logits) + 2, 2, dtype=torch.int64, device=DEVICE)
    sample(
        logits,
        rows=rows,
        tokens=table.tokens,
        length=table.length,
        temperature=table.temperature,
        seed_low=table.seed_low,
        seed_high=table.seed_high,
        thresholds=thresholds,
        out=out,
        scratch=scratch,
    )
    assert not scratch.any()
    return out


def reference_tokens(logits: Tensor, table: Table, rows: Tensor) -> Tensor:
    """The same by layers.sampler, for rows other than 0."""
    vocab_size = logits.shape[1]
    chosen = {f.name: getattr(table, f.name)[rows.long()].cpu() for f in fields(table)}
    greedy = chosen["temperature"] == 0
    cut = ~greedy & ((chosen["top_k"] > 0) | (chosen["top_p"] < 1) | (chosen["min_p"] > 0))

    def indices(mask: Tensor) -> Tensor | None:
        return mask.nonzero()[:, 0] if mask.any() else None

    top_k = chosen["top_k"].long()
    seed = torch.stack([chosen["seed_low"], chosen["seed_high"]], dim=1).view(torch.int64)[:, 0]
    cut_rows = CutRows(
        rows=cut.nonzero()[:, 0],
        top_k=torch.where(top_k > 0, top_k, vocab_size)[cut],
        top_p=chosen["top_p"][cut],
        min_p=chosen["min_p"][cut],
    )
    settings = sampler.SamplingRows(
        greedy=indices(greedy),
        plain=indices(~greedy & ~cut),
        cut=cut_rows if cut.any() else None,
        temperature=torch.where(greedy, 1.0, chosen["temperature"]),
        seed=seed,
    )
    return sampler.sample(logits.float().cpu(), settings, chosen["length"].long())


SIZES = [(160, torch.float32), (151, torch.bfloat16), (1000, torch.float16), (2500, torch.bfloat16)]
if DEVICE == "cuda":
    SIZES += [(151936, torch.bfloat16), (128256, torch.float32)]


@pytest.mark.parametrize(("vocab_size", "dtype"), SIZES)
def test_draws_what_the_reference_draws(vocab_size: int, dtype: torch.dtype) -> None:
    count = 24
    temperature = torch.tensor([1.0, 0.0, 0.6, 2.0, 0.01, 0.0, 1.3, 100.0]).repeat(3)
    table, logits = make_table(count, temperature=temperature), make_logits(count, vocab_size, dtype)
    rows = all_rows(logits)
    expected, length = reference_tokens(logits, table, rows), table.length.clone()
    tokens = draw(logits, table, rows)
    assert tokens.tolist() == expected.tolist()
    assert torch.equal(table.length[1:], length[1:] + 1) and table.length[0] == length[0]
    appended = table.tokens[rows.long(), length[1:].long()]
    assert torch.equal(appended, tokens)
    assert (table.tokens != -1).sum() == count


def test_a_few_rows_are_dealt_out_to_more_programs_and_draw_the_same() -> None:
    logits = make_logits(20, 3000, torch.float32)
    rows = all_rows(logits)
    together, alone = make_table(20), make_table(20)
    tokens = draw(logits, together, rows)
    assert [draw(logits[i : i + 1], alone, rows[i : i + 1]).item() for i in (0, 7, 19)] == tokens[[0, 7, 19]].tolist()


def test_padding_writes_nothing() -> None:
    logits = make_logits(5, 151, torch.bfloat16)
    rows = torch.tensor([3, 0, 1, 5, 0], dtype=torch.int32, device=DEVICE)
    table = make_table(5, temperature=torch.tensor([0.7, 0.7, 0.0, 0.7, 0.7]))
    before = table.length.clone()
    expected = reference_tokens(logits[[0, 2, 3]], table, rows[[0, 2, 3]])
    assert draw(logits, table, rows).tolist() == [expected[0].item(), -1, expected[1].item(), expected[2].item(), -1]
    assert (table.length - before).tolist() == [0, 1, 0, 1, 0, 1]
    assert (table.tokens[[0, 2, 4]] == -1).all()


def test_the_smallest_of_equal_ids_wins() -> None:
    logits = torch.full((1, 5000), -1.0, device=DEVICE)
    logits[0, [4999, 3333, 2077]] = 3.0
    table = make_table(1, temperature=0.0)
    assert draw(logits, table, all_rows(logits)).item() == 2077
    logits[:] = float("-inf")
    assert draw(logits, table, all_rows(logits)).item() == 0


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter
def test_a_broken_model_still_gives_token_ids() -> None:
    logits = torch.full((2, 1030), float("nan"), device=DEVICE)
    tokens = draw(logits, make_table(2, temperature=torch.tensor([0.0, 1.0])), all_rows(logits))
    assert ((tokens >= 0) & (tokens < 1030)).all()


def test_tokens_below_the_threshold_take_no_part() -> None:
    logits = make_logits(40, 30, torch.float32)
    thresholds = logits.sort(dim=-1).values[:, -3].contiguous()
    tokens = draw(logits, make_table(40, temperature=50.0), all_rows(logits), thresholds=thresholds)
    ranks = (logits > logits.gather(1, tokens.long()[:, None])).sum(dim=-1)
    assert set(ranks.tolist()) == {0, 1, 2}


def test_the_same_seed_draws_the_same_and_positions_draw_anew() -> None:
    logits = torch.zeros(2, 1000, device=DEVICE)
    table = make_table(2)
    for column in (table.length, table.seed_low, table.seed_high):
        column[2] = column[1]
    pairs = [draw(logits, table, all_rows(logits)).tolist() for _ in range(6)]
    assert all(one == other for one, other in pairs)
    assert len({one for one, _ in pairs}) > 4


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.5, -1.0], device=DEVICE)
    table = make_table(16, temperature=0.8)
    table.length.zero_()
    batch = logits.expand(16, -1)
    tokens = torch.cat([draw(batch, table, all_rows(batch)) for _ in range(10)])
    assert_distributed(tokens.cpu().numpy(), (logits.double() / 0.8).softmax(dim=-1).cpu().numpy())


# --- top-k, top-p, min-p ----------------------------------------------------------------------------------------------


def kept_by_sorting(logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which of [vocab] logits are kept, computed in float64 over all tokens, ties included."""
    x = logits.double().cpu() / temperature
    kept = torch.ones_like(x, dtype=torch.bool)
    if 0 < top_k < len(x):
        kept &= x >= x.sort(descending=True).values[top_k - 1]
    probabilities = x.softmax(dim=-1)
    if top_p < 1:
        left = probabilities * kept
        values, inverse = x.unique(return_inverse=True)
        masses = torch.zeros(len(values), dtype=torch.float64).index_add_(0, inverse, left)
        above = masses.flip(0).cumsum(0).flip(0) - masses
        kept &= (above < top_p * left.sum())[inverse]
    return kept & (probabilities >= min_p * probabilities.max())


CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 90, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 0.5, "min_p": 0.1},
    {"top_k": 10**6, "top_p": 0.999},
    {},
]


def make_cut_table(vocab_size: int, temperature: float) -> tuple[Table, list[dict[str, Any]]]:
    settings = [
        {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut}
        for cut in [*CUTS, {"top_k": vocab_size}]
    ]
    columns = {name: torch.tensor([chosen[name] for chosen in settings]) for name in settings[0]}
    return make_table(len(settings), **columns), settings


# too few groups for their best four to decide, or enough of them
GROUPED = [
    (160, torch.float32, 1, 0.3),
    (151, torch.bfloat16, 1, 1.0),
    (1000, torch.float16, 8, 0.6),
    (2500, torch.bfloat16, 256, 1.0),
]
if DEVICE == "cuda":
    GROUPED += [
        (151936, torch.bfloat16, 256, 0.6),
        (128256, torch.float32, 256, 1.0),
        (128256, torch.float16, 64, 1.0),
    ]


@pytest.mark.parametrize(("vocab_size", "dtype", "groups", "temperature"), GROUPED)
def test_cuts_are_those_of_sorting(
    vocab_size: int, dtype: torch.dtype, groups: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "GROUPS_PER_WARP", groups)
    table, settings = make_cut_table(vocab_size, temperature)
    logits = make_logits(len(settings), vocab_size, dtype)
    thresholds = thresholds_of(logits, table, all_rows(logits))
    for row, threshold, chosen in zip(logits.float().cpu(), thresholds.cpu(), settings, strict=True):
        differs = (row >= threshold) ^ kept_by_sorting(row, **chosen)
        # a sum of a hundred thousand probabilities may round to either side of the limit
        assert (row / temperature).softmax(dim=-1)[differs].sum() < 1e-6, chosen


@pytest.mark.parametrize("groups", [1, 256])
def test_ties_stay_zero_has_no_sign_and_impossible_tokens_go(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "GROUPS_PER_WARP", groups)
    logits = torch.full((3, 100), float("-inf"), device=DEVICE)
    logits[0, :50] = 0.0
    logits[1, :7] = torch.tensor([3.0, -0.0, 0.0, -0.0, -1.0, -1.0, -2.0])
    logits[2, 40:43] = torch.tensor([-5.0, -4.0, -5.0])
    table = make_table(3, top_k=torch.tensor([10, 0, 2]), top_p=torch.tensor([0.1, 0.95, 0.9]))
    thresholds = thresholds_of(logits, table, all_rows(logits))
    assert (logits >= thresholds[:, None]).sum(dim=-1).tolist() == [50, 4, 3]


def test_rows_without_a_cut_have_no_threshold() -> None:
    logits = make_logits(4, 151, torch.bfloat16)
    table = make_table(3, temperature=torch.tensor([0.0, 1.0, 1.0]), top_k=torch.tensor([5, 0, 151]))
    rows = torch.tensor([1, 2, 0, 3], dtype=torch.int32, device=DEVICE)
    assert thresholds_of(logits, table, rows).tolist() == [float("-inf")] * 4


@pytest.mark.parametrize(("vocab_size", "dtype"), SIZES)
def test_draws_within_the_cut_what_the_reference_draws(vocab_size: int, dtype: torch.dtype) -> None:
    table, settings = make_cut_table(vocab_size, 0.9)
    logits = make_logits(len(settings), vocab_size, dtype)
    rows = all_rows(logits)
    expected = reference_tokens(logits, table, rows)
    tokens = draw(logits, table, rows, thresholds=thresholds_of(logits, table, rows))
    assert tokens.tolist() == expected.tolist()
