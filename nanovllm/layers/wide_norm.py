"""Attention in which one norm spans all heads of the queries, and another all heads of the keys."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.attention.backend import LayerCache
from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.wide_norm_spec import WideNormAttentionSpec


class WideNormAttention(Attention):
    def __init__(self, spec: "WideNormAttentionSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        self._group, self._eps = context.group, spec.wide_norm_eps
        self._wide: dict[str, Tensor] = {}
        for name in ("q_norm", "k_norm"):
            shape = self._weights[name].shard_shape(self._group.rank, self._group.size)
            self._wide[name] = torch.ones(shape, dtype=context.dtype, device=context.device)
        own = self._own
        self._widths = [own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim, own.num_kv_heads * own.head_dim]
        # heads that several ranks hold count as often in the sum and in the number of its elements
        self._shares = torch.tensor([1 / (width * self._group.size) for width in self._widths[:2]]).to(context.device)

    def slots(self) -> dict[str, Slot]:
        found = super().slots()
        for name, tensor in self._wide.items():
            found |= slots_of(self._weights[name], DenseWeight(tensor), self._group.rank, self._group.size)
        return found

    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm | None) -> Tensor:
        qkv = self.qkv_proj(x.rows) if norm is None else self.qkv_proj(x, norm=norm)
        queries, keys, values = qkv.split(self._widths, dim=-1)
        squares = torch.stack([queries.float().square().sum(-1), keys.float().square().sum(-1)], dim=-1)
        factors = (self._group.all_reduce(squares) * self._shares + self._eps).rsqrt()  # [num_tokens, 2]
        queries = (queries.float() * factors[:, :1] * self._wide["q_norm"]).to(qkv.dtype)
        keys = (keys.float() * factors[:, 1:] * self._wide["k_norm"]).to(qkv.dtype)
        qkv = torch.cat([queries, keys, values], dim=-1).view(len(x), -1, self._own.head_dim)
        return self._backend.forward(qkv, self._layer, state, step.attention)
