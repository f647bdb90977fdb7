"""From the request table to the first layer with our kernels: the embedding of each token of a step in one launch."""

from torch import Tensor

from nanovllm.kernels.table import embed
from nanovllm.layers.embedding import Embedding


class KernelInputs:
    def __init__(self, embedding: Embedding, *, pdl: bool) -> None:
        self._embedding = embedding
        self._pdl = pdl

    def of_rows(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The embedding of tokens[row, position] for each of [num_tokens] rows and positions."""
        table = self._embedding.weight.tensor
        out = table.new_empty(len(rows), table.shape[1])
        embed.embed_tokens(tokens, rows, positions, table, out=out)
        return out

    def of_newest(self, tokens: Tensor, length: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The embedding of each row's newest token, whose position is written to `positions`, [num_rows]."""
        table = self._embedding.weight.tensor
        out = table.new_empty(len(rows), table.shape[1])
        embed.gather_inputs(tokens, length, rows, table, positions=positions, out=out, pdl=self._pdl)
        return out
