"""From logits to tokens: greedy, or Gumbel-max with noise that depends on (seed, position, token) alone.

The noise comes from a counter-based generator, so a request draws the same noise whatever it is batched with, on every
device and every rank. Noise is computed only for tokens that top-k, top-p and min-p leave.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_CANDIDATES = 512  # most likely tokens that are examined first for top-k, top-p and min-p
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive ids over the whole range
MASK = 0xFFFFFFFF
BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of the rows of one step, gathered when the batch changes."""

    greedy: Tensor | None  # [n] indices of greedy rows; None = there are none
    plain: Tensor | None  # indices of rows that draw from the whole vocabulary
    cut: Tensor | None  # indices of rows with top-k, top-p or min-p
    temperature: Tensor  # [rows] 1 for greedy rows
    top_k: Tensor  # [rows] int64, vocabulary size = off
    top_p: Tensor  # [rows]
    min_p: Tensor  # [rows]
    seed: Tensor  # [rows] int64


def mix(x: Tensor) -> Tensor:
    """A 32-bit finalizer on int64 tensors that hold 32-bit values: every input bit changes half of the output bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def noise_keys(seed: Tensor, positions: Tensor) -> Tensor:  # [rows] each -> [rows] 32-bit values
    low, high = seed & MASK, (seed >> 32) & MASK
    return mix(mix(mix(low) ^ high) ^ (positions * GOLDEN & MASK))


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise for tokens [rows, n] (or [n], for all rows alike) of rows with these keys: float32 [rows, n]."""
    x = keys[:, None].to(torch.int32) + token_ids.to(torch.int32) * (GOLDEN - 2**32)
    # the same finalizer in wrapping 32-bit arithmetic; a shift of a negative number brings in ones, hence the masks
    x = (x ^ ((x >> 16) & 0xFFFF)).mul_(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    # -log(1 - u) for u in (0, 1): finest where it is small, which is where the noise is large and decides the race
    exponential = (x & 0x7FFFFFFF).float().add_(0.5).mul_(-BELOW_ONE / 2**31).log1p_().neg_()
    return exponential.log_().neg_()


def sample(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """[rows, vocab] float32 and the positions the new tokens will have -> [rows] int64."""
    if rows.plain is None and rows.cut is None:
        return _most_likely(logits)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    keys = noise_keys(rows.seed, positions)
    if rows.greedy is not None:
        tokens[rows.greedy] = _most_likely(logits[rows.greedy])
    if rows.plain is not None:
        scaled = logits[rows.plain] / rows.temperature[rows.plain, None]
        ids = torch.arange(logits.shape[1], device=logits.device)
        tokens[rows.plain] = _most_likely(scaled + gumbel(keys[rows.plain], ids))
    if rows.cut is not None:
        scaled = logits[rows.cut] / rows.temperature[rows.cut, None]
        tokens[rows.cut] = _sample_cut(
            scaled, keys[rows.cut], rows.top_k[rows.cut], rows.top_p[rows.cut], rows.min_p[rows.cut]
        )
    return tokens


def _most_likely(scores: Tensor) -> Tensor:  # [rows, n] -> [rows]
    return scores.max(dim=-1).indices  # as argmax, the first one of equals; on a CPU several times faster


def _sample_cut(scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Gumbel-max among the tokens that top-k, then top-p, and min-p leave."""
    vocab_size = scaled.shape[1]
    total = scaled.logsumexp(dim=-1, keepdim=True)
    for num_candidates in (min(NUM_CANDIDATES, vocab_size), vocab_size):
        values, ids = scaled.topk(num_candidates, dim=-1)
        kept, complete = _keep(values, total, top_k=top_k, top_p=top_p, min_p=min_p)
        if num_candidates == vocab_size or bool(complete.all()):
            break
    values = values.masked_fill(~kept, float("-inf"))
    winner = (values + gumbel(keys, ids)).argmax(dim=-1, keepdim=True)
    return ids.gather(1, winner)[:, 0]


def _keep(values: Tensor, total: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the candidates, most likely first, stay; and for which rows no token beyond them could.

    Tokens tied with the last one that top-k or top-p needs stay too, so that a cut is a threshold on the logits.
    """
    num_candidates = values.shape[1]
    probabilities = (values - total).exp()
    by_k = values >= values.gather(1, (top_k.clamp(max=num_candidates) - 1)[:, None])
    # top-p looks at what top-k left, renormalised; where top-k is off that is the whole distribution
    cut_by_k = top_k[:, None] <= num_candidates
    mass = torch.where(cut_by_k, (probabilities * by_k).sum(dim=-1, keepdim=True), 1.0)
    more_likely = _mass_before(values, probabilities)
    by_p = (more_likely < top_p[:, None] * mass) | (top_p[:, None] >= 1.0)
    by_min = probabilities >= min_p[:, None] * probabilities[:, :1]
    kept = by_k & by_p & by_min
    tied_with_kth = (by_k & cut_by_k)[:, -1]  # and so maybe are tokens beyond the candidates, whose mass counts above
    return kept, ~(kept[:, -1] | tied_with_kth)


def _mass_before(values: Tensor, probabilities: Tensor) -> Tensor:
    """The mass of the tokens more likely than each one: for equals that before the first of them."""
    before = torch.zeros_like(probabilities)
    before[:, 1:] = probabilities.cumsum(dim=-1)[:, :-1]
    before[:, 1:].masked_fill_(values[:, 1:] == values[:, :-1], 0.0)
    return before.cummax(dim=-1).values
