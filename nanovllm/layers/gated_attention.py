"""Attention whose result is multiplied with sigmoid(gate), where the gate comes from the query's projection."""

import torch
from torch import Tensor

from nanovllm.attention.backend import LayerCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step


class GatedAttention(Attention):
    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm) -> Tensor:
        own = self._own
        projected = self.qkv_proj(x, norm=norm).unflatten(1, (-1, own.head_dim))
        queries, gates = projected[:, : 2 * own.num_heads].unflatten(1, (own.num_heads, 2)).unbind(dim=2)
        qkv = torch.cat([queries, projected[:, 2 * own.num_heads :]], dim=1)
        return self._backend.forward(qkv, self._layer, state, step.attention) * gates.flatten(1).sigmoid()
