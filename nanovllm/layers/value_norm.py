"""Attention whose values are normalized, and may be the keys before these are normalized and rotated."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import LayerCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step

if TYPE_CHECKING:
    from nanovllm.layers.value_norm_spec import ValueNormAttentionSpec


class ValueNormAttention(Attention):
    def __init__(self, spec: "ValueNormAttentionSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        self._eps = spec.value_norm_eps

    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm) -> Tensor:
        own = self._own
        projected = self.qkv_proj(x, norm=norm).view(len(x), -1, own.head_dim)  # the last heads are values, or keys
        queries_and_keys = projected[:, : own.num_heads + own.num_kv_heads]
        values = F.rms_norm(projected[:, -own.num_kv_heads :].float(), (own.head_dim,), None, self._eps)
        qkv = torch.cat([queries_and_keys, values.to(projected.dtype)], dim=1)
        return self._backend.forward(qkv, self._layer, state, step.attention)
