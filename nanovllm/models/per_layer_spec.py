"""Per-layer embeddings: a second table that gives every layer an input of its own for each token; no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nanovllm.layers.spec import Dim, Weight, norm_weight
from nanovllm.models.scales import Scales

PROJECTION, NORM = "model.per_layer_model_projection.", "model.per_layer_projection_norm."  # in checkpoints


@dataclass(frozen=True, kw_only=True)
class PerLayerSpec:
    vocab_size: int
    hidden_size: int
    num_layers: int
    size: int  # of one layer's input
    norm_eps: float

    @property
    def width(self) -> int:
        """Columns of the table: the inputs of all layers, side by side."""
        return self.num_layers * self.size

    @property
    def scales(self) -> Scales:
        """Of rows of the table."""
        return Scales(embedding=math.sqrt(self.size), rounds_embedding=True)

    def table(self) -> Weight:
        vocab = Dim(self.vocab_size, divided="tokens of the vocabulary", pads=True)
        return Weight(("model.embed_tokens_per_layer.weight",), (vocab,), Dim(self.width))

    def projection(self) -> Weight:
        """Projects an embedded token to as many numbers, which are added to its row of the table."""
        return Weight(("weight",), (Dim(self.width),), Dim(self.hidden_size), packable=True)

    def norm(self) -> Weight:
        """The norm after the projection, of one layer's part at a time."""
        return norm_weight(self.size)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every parameter with its prefix in checkpoints."""
        yield from (("", self.table()), (PROJECTION, self.projection()), (NORM, self.norm()))
