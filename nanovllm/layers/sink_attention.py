"""Attention with sinks: each head has a learned logit that takes part in the softmax and adds nothing."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import BuildContext
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.sink_spec import SinkAttentionSpec


class SinkAttention(Attention):
    def __init__(self, spec: "SinkAttentionSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        self._group = context.group
        sinks = torch.empty(self._own.num_heads, dtype=context.dtype, device=context.device)
        self._layer = replace(self._layer, sinks=sinks)

    def slots(self) -> dict[str, Slot]:
        assert self._layer.sinks is not None
        own = DenseWeight(self._layer.sinks)
        return super().slots() | slots_of(self._weights["sinks"], own, self._group.rank, self._group.size)
