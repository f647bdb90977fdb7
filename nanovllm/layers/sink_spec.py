"""Attention with sinks: each head has a learned logit that takes part in the softmax and adds nothing; no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.spec import AttentionSpec, Dim, Weight

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class SinkAttentionSpec(AttentionSpec):
    def weights(self) -> dict[str, Weight]:
        heads = Dim(self.num_heads, divided="attention heads")
        return super().weights() | {"sinks": Weight(("sinks",), (heads,))}

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.sink_attention import SinkAttention

        return SinkAttention(self, context)
