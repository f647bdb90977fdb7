"""A step as the layers of the model see it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.layers.sequences import Sequences


@dataclass(frozen=True)
class Step:
    attention: Any  # what the attention backend prepared
    sequences: "Sequences | None" = None  # None if no layer of the model keeps a state per row
    shared_kv: dict[int, Any] = field(default_factory=dict)  # by layer: new keys and values that later layers read too
    layer_inputs: Any = None  # [num_tokens, layers, size] in a model with per-layer embeddings
