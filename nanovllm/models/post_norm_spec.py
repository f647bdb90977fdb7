"""Layers that norm what a part gives, not what it gets: x + norm(mixer(x)), x + norm(feed_forward(x)); no torch."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from nanovllm.layers.spec import LayerSpec

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class PostNormLayerSpec(LayerSpec):
    norm_names: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")

    @classmethod
    def of(cls, layer: LayerSpec) -> "PostNormLayerSpec":
        kept = {field.name: getattr(layer, field.name) for field in fields(layer) if field.name != "norm_names"}
        return cls(**kept)

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.models.post_norm import PostNormLayer

        return PostNormLayer(self, context)
