"""Attention whose values are normalized, and may be the keys before these are normalized and rotated."""

from dataclasses import replace
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
    """Queries, keys and values are normalized at once, so that the backend has only to rotate them."""

    def __init__(self, spec: "ValueNormAttentionSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        assert spec.qk_norm_eps is not None
        self._eps, self._shared_as = spec.qk_norm_eps, spec.shared_as
        self._values_are_keys = spec.values_are_keys
        self._layer = replace(self._layer, q_norm=None, k_norm=None, both_norms=None)
        both = self._norms["both_norms"]
        self._all_norms = torch.ones(len(both) + self._own.num_kv_heads, spec.head_dim).to(both)  # values: 1

    def finish_loading(self) -> None:
        super().finish_loading()
        both = self._norms["both_norms"]
        self._all_norms[: len(both)] = both

    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm) -> Tensor:
        own = self._own
        qkv = self.qkv_proj(x, norm=norm).view(len(x), -1, own.head_dim)
        if self._values_are_keys:
            qkv = torch.cat([qkv, qkv[:, -own.num_kv_heads :]], dim=1)
        qkv = norm_heads(qkv, self._all_norms, self._eps)
        if self._shared_as is not None:
            step.shared_kv[self._shared_as] = qkv[:, own.num_heads :].clone()  # the backend may overwrite its input
        return self._backend.forward(qkv, self._layer, state, step.attention)


def norm_heads(heads: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Each of [num_tokens, heads, head_dim] normalized in float32; `weights`: [heads, head_dim] or [head_dim]."""
    return (F.rms_norm(heads.float(), heads.shape[-1:], None, eps) * weights).to(heads.dtype)
