"""The stage of one of several ranks: it receives hidden states from the stage before and sends them to the next one.

The rank that samples broadcasts the tokens to all. The tensor parallel ranks of a stage hold the same hidden states, so
each sends them to the same rank of the next stage.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.distributed.collectives import sampling_rank
from nanovllm.distributed.group import Parallel
from nanovllm.layers.context import BuildContext
from nanovllm.layers.step import Step
from nanovllm.models.decoder import Decoder
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.stage import Stage

if TYPE_CHECKING:
    from nanovllm.runner.verification import Verification


class PipelineStage(Stage):
    def __init__(self, model: Decoder, context: BuildContext, parallel: Parallel) -> None:
        super().__init__(model, context)
        assert parallel.world is not None, "a pipeline stage is that of one of several ranks"
        self._pipeline = parallel.pipeline
        self._world = parallel.world
        self._sampling_rank = sampling_rank(parallel.rank)
        self._dtype, self._device = context.dtype, context.device

    def inputs(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        if self.model.embed_tokens is not None:
            return super().inputs(tokens, rows, positions)
        assert self._pipeline is not None
        spec = self.model.spec
        width = spec.hidden_size if spec.per_layer is None else spec.hidden_size + spec.per_layer.width
        x = torch.empty(len(rows), width, dtype=self._dtype, device=self._device)
        return self._pipeline.receive(x, self._pipeline.rank - 1)

    def forward(self, x: Tensor, states: list[Any], step: Step, wanted: Tensor | None = None) -> Tensor | None:
        if self._pipeline is None or self._pipeline.rank == self._pipeline.size - 1:
            return self.model(x, states, step, wanted)
        self._pipeline.send(self.model(x, states, step), self._pipeline.rank + 1)
        return None

    def broadcast_tokens(self, tokens: Tensor) -> None:
        self.broadcast(tokens.to(torch.int32))

    def receive_tokens(self, table: RequestTable, rows: Tensor, verification: "Verification | None" = None) -> Tensor:
        tokens = self.broadcast(torch.empty(len(rows), dtype=torch.int32, device=self._device))
        table.append(rows, tokens, verification)
        return tokens

    def broadcast(self, x: Tensor) -> Tensor:
        return self._world.broadcast(x, self._sampling_rank)
