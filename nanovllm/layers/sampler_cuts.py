"""Sampling with top-k, top-p and min-p: looks at the most likely tokens first, and at all only if that is needed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.layers.noise import gumbel
from nanovllm.sampling_params import SamplingParams

NUM_CANDIDATES = 512  # most likely tokens that are examined first


@dataclass(frozen=True)
class CutRows:
    """The rows of a step that have top-k, top-p or min-p; [n] each."""

    rows: Tensor  # indices among the step's rows
    top_k: Tensor  # int64, vocabulary size = off
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, chosen: Mapping[int, SamplingParams], vocab_size: int, device: torch.device) -> "CutRows":
        """`chosen`: the parameters of these rows, by index."""
        params = chosen.values()
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        return cls(
            rows=torch.tensor(list(chosen), device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        )

    def sample(self, scaled: Tensor, keys: Tensor) -> Tensor:
        """Gumbel-max among the tokens that top-k, then top-p, and min-p leave.

        [n, vocab] logits / temperature and [n] keys of the noise -> [n] tokens.
        """
        vocab_size = scaled.shape[1]
        total = scaled.logsumexp(dim=-1, keepdim=True)
        for num_candidates in (min(NUM_CANDIDATES, vocab_size), vocab_size):
            values, ids = scaled.topk(num_candidates, dim=-1)
            kept, complete = _keep(values, total, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
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
