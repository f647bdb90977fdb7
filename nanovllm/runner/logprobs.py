"""Log-probabilities of chosen tokens and of the most likely ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import StepPlan, TokenLogprobs
from nanovllm.runner.request_table import RequestTable

PROMPT_ROWS = 128  # prompt tokens scored at once: [rows, vocab] in float32 is large


@dataclass(frozen=True)
class PendingScores:
    """Scores of some positions, on the device or being copied to the host."""

    token_ids: Tensor  # [rows, 1 + num_top] the chosen token, then the alternatives
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


def score_rows(
    logprobs: Tensor,  # [rows, vocab]
    chosen: Tensor,  # [rows]
    wanted: list[tuple[int, int]],  # as in RowScores
    named: Sequence[Sequence[int]] = (),  # by row: the alternatives, where a request names them
) -> RowScores:
    """Score the chosen tokens and the alternatives: those that a request names, or else the most likely ones."""
    if not any(named):
        return RowScores(score(logprobs, chosen, max(num_top for _, num_top in wanted)), wanted)
    wanted = [(index, len(ids) or num_top) for (index, num_top), ids in zip(wanted, named, strict=True)]
    scores = score(logprobs, chosen, max(num_top for _, num_top in wanted))
    for row, ids in enumerate(named):
        if ids:
            columns = slice(1, 1 + len(ids))
            scores.token_ids[row, columns] = torch.tensor(ids, device=logprobs.device)
            scores.logprobs[row, columns] = logprobs[row, scores.token_ids[row, columns]]
    return RowScores(scores, wanted)


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


def score_prompts(
    plan: StepPlan,
    hidden: Tensor,  # [num_tokens, hidden]
    *,
    first_tokens: np.ndarray,  # [num_decodes + num_row_steps] index of each row's first token
    table: RequestTable,
    logits_of: Callable[[Tensor], Tensor | None],  # None on ranks that have no logits
) -> dict[int, list[PendingScores]]:
    """By row: logprobs of the prompt tokens that follow the positions of each chunk that is scored."""
    scored: dict[int, list[PendingScores]] = {}
    for index, chunk in enumerate(plan.row_steps, len(plan.decode_rows)):
        if chunk.num_prompt_logprobs is None:
            continue
        num_prompt = int(table.num_prompt_tokens[chunk.row])
        first, count = int(first_tokens[index]), min(chunk.num_new, num_prompt - 1 - chunk.start)
        parts = scored[chunk.row] = []
        for begin in range(0, count, PROMPT_ROWS):
            end = min(begin + PROMPT_ROWS, count)
            logits = logits_of(hidden[first + begin : first + end])
            if logits is None:
                continue
            logprobs = logits.float().log_softmax(dim=-1)
            following = table.tokens[chunk.row, chunk.start + 1 + begin : chunk.start + 1 + end]
            parts.append(score(logprobs, following, chunk.num_prompt_logprobs))
    return scored
