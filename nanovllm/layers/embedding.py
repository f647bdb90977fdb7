"""Token embedding."""

from typing import Any

from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.spec import Weight


class Embedding:
    """On one rank; `ShardedEmbedding` is that of several. `weight` has `embed`: dense weights do, and native ones."""

    def __init__(self, spec: Weight, context: BuildContext) -> None:
        self._spec = spec
        self._group = context.group
        shape = spec.shard_shape(context.group.rank, context.group.size)
        self.weight: Any = context.format_of(spec).empty(shape, dtype=context.dtype, device=context.device)

    def slots(self) -> dict[str, Slot]:
        return slots_of(self._spec, self.weight, self._group.rank, self._group.size)

    def __call__(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden]
        return self.weight.embed(token_ids)
