"""Layers that norm what a part gives before it is added: x + norm(mixer(x)), x + norm(feed_forward(x)); no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from nanovllm.layers.refine import refine
from nanovllm.layers.spec import LayerSpec, Weight, norm_weight

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class PostNormLayerSpec(LayerSpec):
    norm_names: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")

    @classmethod
    def of(cls, layer: LayerSpec) -> "PostNormLayerSpec":
        return refine(cls, layer, norm_names=cls.norm_names)

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.models.post_norm import PostNormLayer

        return PostNormLayer(self, context)


@dataclass(frozen=True, kw_only=True)
class SandwichLayerSpec(LayerSpec):
    """With norms before the parts as well: x + norm(mixer(norm(x)))."""

    after_names: tuple[str, str] = ("post_self_attn_layernorm", "post_mlp_layernorm")

    @classmethod
    def of(cls, layer: LayerSpec, **changes: Any) -> Self:
        return refine(cls, layer, **changes)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        yield from super().weights()
        for name in self.after_names:
            yield f"{name}.", norm_weight(self.hidden_size, self.norm_offset)

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.models.post_norm import SandwichLayer

        return SandwichLayer(self, context)
