"""Log-probabilities of chosen tokens and of the most likely ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.plan import TokenLogprobs


@dataclass(frozen=True)
class PendingScores:
    """Scores of some positions, on the device or being copied to the host."""

    token_ids: Tensor  # [rows, 1 + num_top] the chosen token, then the most likely ones
    logprobs: Tensor  # [rows, 1 + num_top]
    ranks: Tensor  # [rows]

    def map(self, function: Callable[[Tensor], Tensor]) -> "PendingScores":
        return PendingScores(function(self.token_ids), function(self.logprobs), function(self.ranks))

    def read(self) -> list[TokenLogprobs]:
        entries = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        return [TokenLogprobs(tuple(ids), tuple(values), rank) for ids, values, rank in entries]


@dataclass(frozen=True)
class RowScores:
    """Scores of a step's sampled tokens; each row has its own number of alternatives."""

    scores: PendingScores  # [len(wanted)]
    wanted: list[tuple[int, int]]  # (index among the sampled positions, number of alternatives)

    def map(self, function: Callable[[Tensor], Tensor]) -> "RowScores":
        return RowScores(self.scores.map(function), self.wanted)

    def read(self) -> dict[int, list[TokenLogprobs]]:
        return {
            index: [TokenLogprobs(row.token_ids[: num_top + 1], row.logprobs[: num_top + 1], row.rank)]
            for (index, num_top), row in zip(self.wanted, self.scores.read(), strict=True)
        }


def score_rows(logprobs: Tensor, chosen: Tensor, wanted: list[tuple[int, int]]) -> RowScores:
    return RowScores(score(logprobs, chosen, max(num_top for _, num_top in wanted)), wanted)


def score(logprobs: Tensor, chosen: Tensor, num_top: int) -> PendingScores:
    """Score [rows] chosen tokens and the `num_top` most likely ones, given [rows, vocab] log-probabilities."""
    chosen = chosen.long()[:, None]
    own = logprobs.gather(1, chosen)
    top, ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return PendingScores(
        token_ids=torch.cat([chosen, ids], dim=1),
        logprobs=torch.cat([own, top], dim=1),
        ranks=(logprobs > own).sum(dim=-1) + 1,
    )
