"""A layer of Gemma 4; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.normed_router_spec import NormedRouterMoeSpec
from nanovllm.layers.spec import Dim, Weight, norm_weight
from nanovllm.models.post_norm_spec import SandwichLayerSpec

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext

EXPERTS = "moe"  # router and experts, which files have without this name before theirs


@dataclass(frozen=True, kw_only=True)
class Gemma4LayerSpec(SandwichLayerSpec):
    """A sandwich whose result is multiplied with a learned number.

    With experts, norm(experts(norm(x))) is added to norm(mlp(norm(x))) before the norm after the feed-forward. With
    per-layer embeddings, x + norm(projection(gelu(gate(x)) * input)) comes before the factor.
    """

    index: int  # in the model
    input_size: int = 0  # of the layer's own input of each token; 0 = the model has no per-layer embeddings
    experts: NormedRouterMoeSpec | None = None
    experts_name: str = EXPERTS
    # in checkpoints: of the norm after the MLP, and of those before and after the experts
    expert_norms: tuple[str, ...] = (
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
    )

    def input_weights(self) -> dict[str, Weight]:
        """Those of gate, projection and norm, by their names in checkpoints."""
        if not self.input_size:
            return {}
        hidden, size = Dim(self.hidden_size), Dim(self.input_size)
        return {
            "per_layer_input_gate": Weight(("weight",), (size,), hidden, packable=True),
            "per_layer_projection": Weight(("weight",), (hidden,), size, packable=True),
            "post_per_layer_input_norm": norm_weight(self.hidden_size),
        }

    def weights(self) -> Iterator[tuple[str, Weight]]:
        yield from super().weights()
        yield "layer_scalar.", norm_weight(1)
        yield from ((f"{name}.", weight) for name, weight in self.input_weights().items())
        if self.experts is not None:
            yield from ((f"{self.experts_name}.", weight) for weight in self.experts.weights().values())
            yield from ((f"{name}.", norm_weight(self.hidden_size)) for name in self.expert_norms)

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.models.gemma4_layer import Gemma4Layer

        return Gemma4Layer(self, context)
