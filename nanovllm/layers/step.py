"""A step as the layers of the model see it."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.layers.sequences import Sequences


@dataclass(frozen=True)
class Step:
    attention: Any  # what the attention backend prepared
    sequences: "Sequences | None" = None  # None if no layer of the model keeps a state per row
    positions: Any = None  # [num_tokens]; that of padding is -1 or 0
    shared_kv: dict[int, Any] = field(default_factory=dict)  # by layer: new keys and values that later layers read too
    layer_inputs: Any = None  # [num_tokens, layers, size] in a model with per-layer embeddings

    def of_sampled(self) -> "Step":
        """The same for a last layer, of which only sampled tokens are needed, if the backend can leave out others."""
        of_sampled = getattr(self.attention, "of_sampled", None)
        return self if of_sampled is None else replace(self, attention=of_sampled())
