"""This rank's stage of the pipeline within a step: hidden states come from the stage before and go to the one behind,
and the tokens come back to all from the one rank that draws them. Alone, it is the whole model.

Ranks of a stage that share its layers hold the same hidden states, so each passes them to its like in the next stage.
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


class Stage:
    def __init__(self, model: Decoder, parallel: Parallel, context: BuildContext) -> None:
        self.model = model
        self._group = parallel.pipeline
        self._world = parallel.world
        self._drawing_rank = parallel.rank.sampling_index
        self._dtype, self._device = context.dtype, context.device
        self._inputs: TokenInputs | None = None  # None on later stages
        if model.embed_tokens is not None:
            self._inputs = TokenInputs(model.embed_tokens, context)

    def inputs(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """What the layers get for tokens[row, position] of [num_tokens] rows and positions."""
        if self._inputs is not None:
            return self._inputs.of_rows(tokens, rows, positions)
        return self._received(len(rows))

    def newest_inputs(self, table: RequestTable, rows: Tensor, positions: Tensor) -> Tensor:
        """The same for each row's newest token, whose position is written to `positions`, [num_rows]."""
        if self._inputs is not None:
            return self._inputs.of_newest(table.tokens, table.length, rows, positions)
        torch.sub(table.length[rows], 1, out=positions)
        return self._received(len(rows))

    def _received(self, num_tokens: int) -> Tensor:
        x = torch.empty(num_tokens, self.model.spec.hidden_size, dtype=self._dtype, device=self._device)
        return self._group.receive(x, self._group.rank - 1)

    def forward(self, x: Tensor, states: list[Any], step: Step, wanted: Tensor | None = None) -> Tensor | None:
        """Through the stage's layers, the `wanted` tokens, [n] indices, to the end; None where later stages go on."""
        if self._group.rank == self._group.size - 1:
            return self.model(x, states, step, wanted)
        self._group.send(self.model(x, states, step), self._group.rank + 1)
        return None

    def logits(self, hidden: Tensor | None) -> Tensor | None:  # [num_rows, hidden] -> [num_rows, vocab]
        """Where tokens are drawn: on the first rank of the last stage."""
        return None if hidden is None else self.model.logits(hidden)

    def tell_tokens(self, tokens: Tensor) -> None:
        """Of who drew them: a step's tokens, [n], that its own table already has."""
        if self._world.size > 1:
            self.agree(tokens.to(torch.int32))

    def hear_tokens(self, table: RequestTable, rows: Tensor, sampled: SampledPositions | None = None) -> Tensor:
        """Of all others: [n] tokens of [n] rows, 0 = padding, appended to them."""
        tokens = self.agree(torch.empty(len(rows), dtype=torch.int32, device=self._device))
        table.append(rows, tokens, sampled)
        return tokens

    def agree(self, x: Tensor) -> Tensor:
        """The drawing rank's `x` for all."""
        return self._world.broadcast(x, self._drawing_rank)
