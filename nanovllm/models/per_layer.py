"""The decoder of a model with per-layer embeddings: every layer gets an input of its own for each token.

The inputs of all layers stand beside the embedded tokens in one tensor, [num_tokens, hidden + layers * size]. Pipeline
stages send it on like that, so a later stage needs no embeddings.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Slot
from nanovllm.layers.context import BuildContext
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.step import Step
from nanovllm.models.decoder import Decoder
from nanovllm.models.per_layer_spec import NORM, PROJECTION, PerLayerSpec
from nanovllm.models.scales import Scales
from nanovllm.models.shard import Shard

if TYPE_CHECKING:
    from nanovllm.layers.part import Part


class PerLayerEmbedding(Embedding):
    def __init__(self, tokens: Embedding, spec: PerLayerSpec, scales: Scales, context: BuildContext) -> None:
        """`tokens`: the embedding that gives the input of the first layer; `scales`: of these embedded tokens."""
        self.weight = tokens.weight
        self._tokens, self._scales, self._own = tokens, scales, spec
        self._table = type(tokens)(spec.table(), context)
        self.projection = Linear({"weight": spec.projection()}, context.within(PROJECTION))
        self.norm = RMSNorm(spec.norm(), context, eps=spec.norm_eps)

    def slots(self) -> dict[str, Slot]:
        return self._tokens.slots() | self._table.slots()

    def __call__(self, token_ids: Tensor) -> Tensor:  # [num_tokens] -> [num_tokens, hidden + layers * size]
        x = self._tokens(token_ids)
        looked_up = self._own.scales.embedded(self._table(token_ids))
        projected = self.projection(self._scales.embedded(x)) * self._own.hidden_size**-0.5
        projected = self.norm(projected.view(-1, self._own.size)).reshape(looked_up.shape)
        return torch.cat([x, (projected + looked_up) * 2**-0.5], dim=1)


class PerLayerDecoder(Decoder):
    def __init__(self, shard: Shard, context: BuildContext) -> None:
        super().__init__(shard, context)
        spec = self.spec
        assert spec.per_layer is not None
        self._embedding: PerLayerEmbedding | None = None
        if self.embed_tokens is not None:
            scales = spec.scales or Scales()
            self._embedding = PerLayerEmbedding(self.embed_tokens, spec.per_layer, scales, context)
            self.embed_tokens = self._embedding

    def __call__(
        self, x: Tensor, states: list[Any], step: Step, wanted: Tensor | None = None, which: slice = slice(None)
    ) -> Tensor:
        x, inputs = x.split([self.spec.hidden_size, x.shape[1] - self.spec.hidden_size], dim=1)
        step = replace(step, layer_inputs=inputs.unflatten(1, (self.spec.num_layers, -1)))
        hidden = super().__call__(x.contiguous(), states, step, wanted, which)
        return hidden if self.shard.has_head else torch.cat([hidden, inputs], dim=1)

    def _parts(self) -> "dict[str, Part]":
        own = self._embedding
        return super()._parts() | ({} if own is None else {PROJECTION: own.projection, NORM: own.norm})
