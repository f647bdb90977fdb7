"""One vector for each row that pools: its final hidden states, that of the last token or the mean of all."""

import torch
from torch import Tensor

from nanovllm.plan import RowStep, StepPlan
from nanovllm.runner.forward_batch import ForwardBatch
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.stage import Stage


class Pooler:
    def __init__(self, stage: Stage, table: RequestTable, *, hidden_size: int, device: torch.device) -> None:
        self._stage = stage
        self._table = table
        self._hidden_size, self._device = hidden_size, device
        self._sums: dict[int, Tensor] = {}  # by row, [hidden] float32: the sum over the chunks computed so far

    def pool(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor | None) -> dict[int, Tensor]:
        """Return [hidden] float32 of unit length for each row whose last chunk this is.

        `hidden` is [num_tokens, hidden] as the last layer left it, None on ranks of earlier pipeline stages; all ranks
        get the vectors.
        """
        found: dict[int, Tensor] = {}
        for index, step in enumerate(plan.row_steps, len(plan.decode_rows)):
            if step.pooling is None:
                continue
            vector = None
            if hidden is not None:
                first, norm = int(batch.first_tokens[index]), self._stage.model.norm
                assert norm is not None, "the last pipeline stage has the final norm"
                vector = self._pool(step, norm(hidden[first : first + step.num_new]).float())
            if step.start + step.num_new == self._table.host_length[step.row]:
                found[step.row] = self._on_all_ranks(vector)
        return found

    def _pool(self, step: RowStep, hidden: Tensor) -> Tensor:
        """The vector up to the end of a chunk, whose normed hidden states are [num_new, hidden]."""
        if step.pooling == "last":
            return hidden[-1]
        total = hidden.sum(dim=0)
        if step.start > 0:
            total += self._sums.pop(step.row)
        self._sums[step.row] = total
        return total / (step.start + step.num_new)

    def _on_all_ranks(self, vector: Tensor | None) -> Tensor:
        if vector is None:
            vector = torch.empty(self._hidden_size, dtype=torch.float32, device=self._device)
        vector = self._stage.broadcast(vector.contiguous())
        return vector / vector.norm().clamp(min=1e-12)
