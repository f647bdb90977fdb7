"""Token embedding at the bottom, logits at the top."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear import Linear


class Embedding:
    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden]
        return F.embedding(token_ids, self.weight)


class LMHead(Linear):
    """Logits in float32, whatever the weights are in."""

    def tie(self, embedding: Embedding) -> None:
        self.weight = embedding.weight

    def __call__(self, x: Tensor) -> Tensor:  # [num_rows, hidden] -> [num_rows, vocab]
        return super().__call__(x).float()
