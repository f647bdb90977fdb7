"""Attention whose result is multiplied with sigmoid(gate); the gate comes from the query's projection. No torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.layers.spec import Dim, Weight
from nanovllm.layers.stored_spec import StoredAttentionSpec

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class GatedAttentionSpec(StoredAttentionSpec):
    """q_proj has the rows of a head's query, then those of its gate."""

    def weights(self) -> dict[str, Weight]:
        found = super().weights()
        for name, weight in found.items():
            if name.startswith("qkv_"):
                queries, keys, values = weight.rows
                order = (*(queries.order or range(self.head_dim)), *range(self.head_dim, 2 * self.head_dim))
                both = Dim(self.num_heads, 2 * self.head_dim, queries.divided, order=order)
                found[name] = replace(weight, rows=(both, keys, values))
        return found

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.gated_attention import GatedAttention

        return GatedAttention(self, context)
