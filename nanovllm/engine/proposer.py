"""Proposed tokens: guesses how a sequence continues, which the model verifies several at a time."""

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Proposes the next tokens of a sequence.

    Each token is sampled from the model's own logits whether it was proposed or not, so the output does not depend on
    the proposer. A right proposal saves a step, a wrong one costs the computation of one more position.
    """

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """Return up to `max_tokens` token ids of the model's vocabulary that may follow `token_ids`.

        `token_ids` has the prompt and the completion so far and must not be changed.
        """
        ...
