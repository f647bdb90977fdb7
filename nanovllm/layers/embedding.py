"""Token embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.spec import Weight
from nanovllm.weights.dense import DenseWeight


class Embedding:
    """With several ranks each holds the rows of some tokens of the vocabulary, in the order of ranks."""

    def __init__(self, spec: Weight, context: BuildContext) -> None:
        self._spec = spec
        self._group = context.group
        shape = spec.shard_shape(context.group.rank, context.group.size)
        self.weight = DenseWeight(torch.empty(shape, dtype=context.dtype, device=context.device))

    def slots(self) -> dict[str, Slot]:
        return slots_of(self._spec, self.weight, self._group.rank, self._group.size)

    @property
    def whole(self) -> bool:
        """Whether this rank holds all rows."""
        return self._group.size == 1

    def __call__(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden]
        table = self.weight.tensor
        if self.whole:
            return F.embedding(token_ids, table)
        num_rows = table.shape[0]
        own = token_ids - self._group.rank * num_rows
        x = F.embedding(own.clamp(0, num_rows - 1), table)
        known = (own >= 0) & (own < num_rows)
        return self._group.all_reduce(torch.where(known[:, None], x, 0))
