"""Attention whose queries are scaled by their position, so that scores of long contexts stay apart."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.attention.backend import LayerCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step

if TYPE_CHECKING:
    from nanovllm.layers.query_scale_spec import ScaledQueryAttentionSpec


def query_factors(spec: "ScaledQueryAttentionSpec", spans: Tensor) -> Tensor:
    """`spans`: how many times the original length fits before a position."""
    return 1 + spec.beta * torch.log1p(spans.float())


class ScaledQueryAttention(Attention):
    def __init__(self, spec: "ScaledQueryAttentionSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        self._length = spec.original_length
        factors = query_factors(spec, torch.arange(spec.max_position // spec.original_length + 1))
        self._factors = factors.to(context.device, context.dtype)[:, None, None]  # [spans of that length, 1, 1]

    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm) -> Tensor:
        qkv = self.qkv_proj(x, norm=norm).view(len(x), -1, self._own.head_dim)
        # scaling and rotation may change places; padding, at position -1, takes the last factor
        qkv[:, : self._own.num_heads] *= self._factors[step.positions // self._length]
        return self._backend.forward(qkv, self._layer, state, step.attention)
