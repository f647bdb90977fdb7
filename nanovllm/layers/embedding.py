"""Token embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.distributed.group import ALONE, Group
from nanovllm.kernels.launch import dependent_launch, usable


class Embedding:
    """With several ranks each knows `num_rows` tokens of the vocabulary, in the order of ranks; the sum is complete."""

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        self.weight = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
        self._group = group
        self._kernels = None
        if usable(device.type):
            from nanovllm.kernels.table import embed

            self._kernels = embed

    def of_rows(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The embedding of tokens[row, position] for each of [num_tokens] rows and positions."""
        if self._group.size > 1:
            return self._over_ranks(tokens, rows, positions)
        if self._kernels is None:
            return F.embedding(tokens[rows, positions], self.weight)
        out = self._empty(len(rows))
        self._kernels.embed_tokens(tokens, rows, positions, self.weight, out=out)
        return out

    def of_newest(self, tokens: Tensor, length: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The embedding of each row's newest token, whose position is written to `positions`, [num_rows]."""
        if self._group.size > 1:
            return self._over_ranks(tokens, rows, torch.sub(length[rows], 1, out=positions))
        assert self._kernels is not None
        out = self._empty(len(rows))
        self._kernels.gather_inputs(
            tokens, length, rows, self.weight, positions=positions, out=out, pdl=dependent_launch()
        )
        return out

    def _over_ranks(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        num_rows = self.weight.shape[0]
        own = tokens[rows, positions.clamp(min=0)] - self._group.rank * num_rows
        x = F.embedding(own.clamp(0, num_rows - 1), self.weight)
        known = (own >= 0) & (own < num_rows)
        return self._group.all_reduce(torch.where(known[:, None], x, 0))

    def _empty(self, num_tokens: int) -> Tensor:  # [num_tokens, hidden]
        return torch.empty(num_tokens, self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device)
