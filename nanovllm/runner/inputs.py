"""From the request table to the first layer: the embedding of each token of a step."""

import torch
from torch import Tensor

from nanovllm.layers.context import BuildContext
from nanovllm.layers.embedding import Embedding


class TokenInputs:
    def __init__(self, embedding: Embedding, context: BuildContext) -> None:
        self._embedding = embedding
        self._pdl = context.pdl
        self._kernels = None
        if context.kernels and embedding.whole:
            from nanovllm.kernels.table import embed

            self._kernels = embed

    def of_rows(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The embedding of tokens[row, position] for each of [num_tokens] rows and positions."""
        if self._kernels is None:
            return self._embedding(tokens[rows, positions])
        table = self._embedding.weight.tensor
        out = table.new_empty(len(rows), table.shape[1])
        self._kernels.embed_tokens(tokens, rows, positions, table, out=out)
        return out

    def of_newest(self, tokens: Tensor, length: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The embedding of each row's newest token, whose position is written to `positions`, [num_rows]."""
        if self._kernels is None:
            torch.sub(length[rows], 1, out=positions)
            return self._embedding(tokens[rows, positions.clamp(min=0)])
        table = self._embedding.weight.tensor
        out = table.new_empty(len(rows), table.shape[1])
        self._kernels.gather_inputs(tokens, length, rows, table, positions=positions, out=out, pdl=self._pdl)
        return out
