"""What a step returns of prompts: logprobs of their tokens, and pooled vectors. Both need all tokens' hidden states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.plan import StepPlan
from nanovllm.runner.forward_batch import ForwardBatch
from nanovllm.runner.logprobs import PendingScores, score_prompts
from nanovllm.runner.pooling import Pooler
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.stage import Stage


@dataclass(frozen=True)
class PendingPrompts:
    """By row of the request table, on the device or being copied to the host."""

    logprobs: dict[int, list[PendingScores]]
    pooled: dict[int, Tensor]  # [hidden] float32

    def map(self, function: Callable[[Tensor], Tensor]) -> "PendingPrompts":
        logprobs = {row: [part.map(function) for part in parts] for row, parts in self.logprobs.items()}
        return PendingPrompts(logprobs, {row: function(vector) for row, vector in self.pooled.items()})

    def read(self) -> dict[str, Any]:
        """Fields of a StepResult."""
        logprobs = {row: [entry for part in parts for entry in part.read()] for row, parts in self.logprobs.items()}
        return {"prompt_logprobs": logprobs, "pooled": {row: vector.tolist() for row, vector in self.pooled.items()}}


class PromptOutputs:
    def __init__(self, stage: Stage, table: RequestTable, *, device: torch.device) -> None:
        self._stage = stage
        self._table = table
        self._pooler = Pooler(stage, table, hidden_size=stage.model.spec.hidden_size, device=device)

    def compute(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor | None) -> PendingPrompts:
        """`hidden`: [num_tokens, hidden] as the last layer left it; None on ranks of earlier pipeline stages."""
        pooled = self._pooler.pool(plan, batch, hidden)
        if hidden is None:
            return PendingPrompts({}, pooled)
        logits_of = self._stage.model.logits
        scored = score_prompts(plan, hidden, first_tokens=batch.first_tokens, table=self._table, logits_of=logits_of)
        return PendingPrompts(scored, pooled)
