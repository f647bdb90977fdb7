"""Attention in which one norm spans all heads of the queries, and another all heads of the keys; no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.spec import AttentionSpec, Weight

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class WideNormAttentionSpec(AttentionSpec):
    wide_norm_eps: float

    def weights(self) -> dict[str, Weight]:
        found = super().weights()
        queries, keys, _ = found["qkv_weight"].rows
        return found | {"q_norm": Weight(("q_norm.weight",), (queries,)), "k_norm": Weight(("k_norm.weight",), (keys,))}

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.wide_norm import WideNormAttention

        return WideNormAttention(self, context)
