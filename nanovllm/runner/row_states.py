"""Copies of the state per row, so that rows can go back to before a verification."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nanovllm.plan import StepPlan


class RowStateCopies:
    """Keys and values of rejected tokens are overwritten later; a state per row has to be put back.

    If a verified token was rejected, the next step of the row starts where the verification started.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, list[Tensor]]] = {}  # by row: the verification's start, the states before it

    def apply(self, plan: StepPlan, states: Sequence[Any]) -> None:
        """Before a step runs: put back the states of rows that start again, and copy those of rows to be verified.

        `states` has the state of each layer: a cache in blocks, or a tensor [max_num_seqs + 1, ...].
        """
        per_row = [state for state in states if isinstance(state, Tensor)]
        for step in plan.row_steps:
            start, copies = self._copies.pop(step.row, (-1, []))
            if start == step.start:
                for state, copy in zip(per_row, copies, strict=True):
                    state[step.row] = copy
            if step.proposed:
                self._copies[step.row] = step.start, [state[step.row].clone() for state in per_row]
