"""Token embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import dependent_launch, usable


class Embedding:
    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self._kernels = None
        if usable(device.type):
            from nanovllm.kernels import embed

            self._kernels = embed

    def of_rows(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The embedding of tokens[row, position] for each of [num_tokens] rows and positions."""
        if self._kernels is None:
            return F.embedding(tokens[rows, positions], self.weight)
        out = self._empty(len(rows))
        self._kernels.embed_tokens(tokens, rows, positions, self.weight, out=out)
        return out

    def of_newest(self, tokens: Tensor, length: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The embedding of each row's newest token, whose position is written to `positions`, [num_rows]."""
        assert self._kernels is not None
        out = self._empty(len(rows))
        self._kernels.gather_inputs(
            tokens, length, rows, self.weight, positions=positions, out=out, pdl=dependent_launch()
        )
        return out

    def _empty(self, num_tokens: int) -> Tensor:  # [num_tokens, hidden]
        return torch.empty(num_tokens, self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device)
