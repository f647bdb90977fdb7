"""Multi-head latent attention (MLA): project to queries and the latent, attend, project."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.attention.backend import LayerCache
from nanovllm.attention.latent import LatentBackend, LatentLayer
from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import part_of
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.latent_spec import LatentAttentionSpec


class LatentAttention:
    def __init__(self, spec: "LatentAttentionSpec", context: BuildContext) -> None:
        assert isinstance(context.attention, LatentBackend)
        self._weights, self._group, self._backend = spec.weights(), context.group, context.attention
        num_heads = spec.on_ranks(context.group.size).num_heads
        eps = spec.latent_norm_eps
        self.in_proj = Linear(part_of(self._weights, "in_"), context)  # queries, or what they are made of; the latent
        self.o_proj = Linear(part_of(self._weights, "o_"), context)
        self.latent_norm = RMSNorm(self._weights["latent_norm"], context, eps=eps)
        self.q_proj: Linear | None = None
        if spec.query_rank is not None:
            self.q_proj = Linear({"weight": self._weights["q_weight"]}, context)
            self.q_norm = RMSNorm(self._weights["q_norm"], context, eps=eps)
        shape = (num_heads, spec.plain_size + spec.value_size, spec.latent_size)
        self._layer = LatentLayer(
            scale=spec.score_scale,
            rope=context.ropes.index(spec.rope),
            kv_b=torch.empty(shape, dtype=context.dtype, device=context.device),
            norm=self.latent_norm,
        )

    def slots(self) -> dict[str, Slot]:
        kv_b = DenseWeight(self._layer.kv_b.flatten(0, 1))
        found = slots_of(self._weights["kv_b"], kv_b, self._group.rank, self._group.size)
        for part in self._parts():
            found |= part.slots()
        return found

    def finish_loading(self) -> None:
        for part in self._parts():
            part.finish_loading()

    def _parts(self) -> list[Linear | RMSNorm]:
        found: list[Linear | RMSNorm] = [self.in_proj, self.o_proj, self.latent_norm]
        return found if self.q_proj is None else [*found, self.q_proj, self.q_norm]

    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm) -> Tensor:
        """[num_tokens, heads * value_size]"""
        projected = self.in_proj(x, norm=norm)
        queries, new = projected.tensor_split((-self._backend.shape.head_dim,), dim=1)
        if self.q_proj is not None:
            queries = self.q_proj(Residual(queries), norm=self.q_norm)
        return self._backend.attend(queries, new, self._layer, state, step.attention)
