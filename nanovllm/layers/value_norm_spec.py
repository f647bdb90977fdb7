"""Attention whose values are normalized, and may be the keys before these are normalized and rotated; no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.spec import AttentionSpec, Weight, linear_weights

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class ValueNormAttentionSpec(AttentionSpec):
    """Queries and keys are normalized too: `qk_norm_eps` is that of all norms."""

    values_are_keys: bool = False  # there is no projection of values
    shared_as: int | None = None  # the layer's number, if later layers read its keys and values

    def weights(self) -> dict[str, Weight]:
        found = super().weights()
        if not self.values_are_keys:
            return found
        queries, keys, _ = found["qkv_weight"].rows
        hidden = found["qkv_weight"].columns
        assert hidden is not None
        return found | linear_weights(("q_proj", "k_proj"), (queries, keys), hidden, bias=self.qkv_bias, prefix="qkv_")

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.value_norm import ValueNormAttention

        return ValueNormAttention(self, context)
