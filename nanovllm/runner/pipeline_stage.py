"""The pipeline stage of this rank: it receives hidden states from the stage before and sends them to the next one.

The rank that samples broadcasts the tokens to all. Without pipeline parallelism the stage is the whole model. The
tensor parallel ranks of a stage hold the same hidden states, so each sends them to the same rank of the next stage.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.distributed.group import Parallel
from nanovllm.layers.context import BuildContext
from nanovllm.layers.step import Step
from nanovllm.models.decoder import Decoder
from nanovllm.runner.inputs import TokenInputs
from nanovllm.runner.request_table import RequestTable, SampledPositions


class PipelineStage:
    def __init__(self, model: Decoder, parallel: Parallel, context: BuildContext) -> None:
        self.model = model
        self._group = parallel.pipeline
        self._world = parallel.world
        self._sampling_rank = parallel.rank.sampling_index
        self._dtype, self._device = context.dtype, context.device
        self._inputs: TokenInputs | None = None  # None on later stages
        if model.embed_tokens is not None:
            self._inputs = TokenInputs(model.embed_tokens, context)

    def inputs(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The input of the layers for tokens[row, position], given [num_tokens] rows and positions."""
        if self._inputs is not None:
            return self._inputs.of_rows(tokens, rows, positions)
        return self._received(len(rows))

    def newest_inputs(self, table: RequestTable, rows: Tensor, positions: Tensor) -> Tensor:
        """The same for each row's newest token; writes its position to `positions`, [num_rows]."""
        if self._inputs is not None:
            return self._inputs.of_newest(table.tokens, table.length, rows, positions)
        torch.sub(table.length[rows], 1, out=positions)
        return self._received(len(rows))

    def _received(self, num_tokens: int) -> Tensor:
        x = torch.empty(num_tokens, self.model.spec.hidden_size, dtype=self._dtype, device=self._device)
        return self._group.receive(x, self._group.rank - 1)

    def forward(self, x: Tensor, states: list[Any], step: Step, wanted: Tensor | None = None) -> Tensor | None:
        """Run the layers of the stage; returns hidden states on the last stage, else None.

        `wanted`: [n] indices of the tokens whose hidden states are needed; None = all.
        """
        if self._group.rank == self._group.size - 1:
            return self.model(x, states, step, wanted)
        self._group.send(self.model(x, states, step), self._group.rank + 1)
        return None

    def logits(self, hidden: Tensor | None) -> Tensor | None:  # [num_rows, hidden] -> [num_rows, vocab]
        """On the first rank of the last stage, which samples; None on all others."""
        return None if hidden is None else self.model.logits(hidden)

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Broadcast the sampled tokens, [n]; called on the rank that sampled and has appended them to its table."""
        if self._world.size > 1:
            self.broadcast(tokens.to(torch.int32))

    def receive_tokens(self, table: RequestTable, rows: Tensor, sampled: SampledPositions | None = None) -> Tensor:
        """Receive the [n] sampled tokens of [n] rows, 0 = padding, and append them; called on all other ranks."""
        tokens = self.broadcast(torch.empty(len(rows), dtype=torch.int32, device=self._device))
        table.append(rows, tokens, sampled)
        return tokens

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the `x` of the rank that samples, on all ranks."""
        return self._world.broadcast(x, self._sampling_rank)
