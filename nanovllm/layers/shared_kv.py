"""Attention that reads the keys and values of an earlier layer and has none of its own.

The earlier layer leaves the keys and values of a step's new tokens in the step. They are given to the backend together
with this layer's queries and the earlier layer's cache, into which the backend writes them once more, unchanged.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.attention.backend import LayerAttention, LayerCache
from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import part_of
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step
from nanovllm.layers.value_norm import norm_heads
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.shared_kv_spec import SharedKvAttentionSpec


class SharedKvAttention:
    def __init__(self, spec: "SharedKvAttentionSpec", context: BuildContext) -> None:
        own, self._weights = spec.attention, spec.weights()
        assert own.qk_norm_eps is not None
        self._source, self._head_dim, self._eps = spec.source, own.head_dim, own.qk_norm_eps
        self._backend = context.attention
        self.q_proj = Linear(part_of(self._weights, "query_"), context)
        self.o_proj = Linear(part_of(self._weights, "o_"), context)
        self._norm = torch.ones(own.head_dim, dtype=context.dtype, device=context.device)
        rope = context.ropes.index(own.rope)
        self._layer = LayerAttention(scale=own.score_scale, window=own.window, rope=rope)

    def slots(self) -> dict[str, Slot]:
        found = self.q_proj.slots() | self.o_proj.slots()
        return found | slots_of(self._weights["q_norm"], DenseWeight(self._norm))

    def finish_loading(self) -> None:
        self.q_proj.finish_loading()
        self.o_proj.finish_loading()

    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm) -> Tensor:
        """`state`: that of the earlier layer."""
        queries = self.q_proj(x, norm=norm).view(len(x), -1, self._head_dim)
        queries = norm_heads(queries, self._norm, self._eps)
        qkv = torch.cat([queries, step.shared_kv[self._source]], dim=1)
        return self._backend.forward(qkv, self._layer, state, step.attention)
