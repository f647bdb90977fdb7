"""A step that verifies proposed tokens: a row samples after each of them and keeps what agrees."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanovllm.plan import StepPlan, TokenLogprobs


@dataclass(frozen=True)
class Verification:
    """A verified row occurs several times among the sampled positions, once more than it has proposed tokens."""

    plan: StepPlan
    lengths: Tensor  # [num_sampled] int32 tokens of the row before each sampled one
    new_lengths: Tensor  # [num_sampled] int32 of the row after the step: unchanged where proposals are verified

    def rows_with_one_token(self) -> np.ndarray:
        """The sampled rows that grow by one token. Of the others, the next plan says how many tokens were kept."""
        rows = [step.row for step in self.plan.row_steps if step.num_sampled and not step.proposed]
        return np.array(self.plan.decode_rows + tuple(rows), dtype=np.int64)

    def kept(
        self, sampled: Sequence[int], logprobs: dict[int, list[TokenLogprobs]]
    ) -> tuple[list[list[int]], dict[int, list[TokenLogprobs]]]:
        """By row, the sampled tokens up to the first one that differs from the proposed one, and their logprobs.

        `sampled` and the keys of `logprobs` count sampled positions.
        """
        tokens: list[list[int]] = []
        kept_logprobs: dict[int, list[TokenLogprobs]] = {}
        begin = 0
        proposed = [step.proposed for step in self.plan.row_steps if step.num_sampled]
        for index, guesses in enumerate([()] * len(self.plan.decode_rows) + proposed):
            own = list(sampled[begin : begin + len(guesses) + 1])
            count = 1 + next((i for i, guess in enumerate(guesses) if own[i] != guess), len(guesses))
            tokens.append(own[:count])
            if begin in logprobs:
                kept_logprobs[index] = [entry for at in range(begin, begin + count) for entry in logprobs[at]]
            begin += len(own)
        return tokens, kept_logprobs
