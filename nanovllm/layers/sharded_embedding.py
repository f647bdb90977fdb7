"""Token embedding on several ranks: each holds the rows of some tokens of the vocabulary, in the order of ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.embedding import Embedding


class ShardedEmbedding(Embedding):
    def __call__(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden]
        table = self.weight.tensor
        num_rows = table.shape[0]
        own = token_ids - self._group.rank * num_rows
        x = F.embedding(own.clamp(0, num_rows - 1), table)
        known = (own >= 0) & (own < num_rows)
        return self._group.all_reduce(torch.where(known[:, None], x, 0))
