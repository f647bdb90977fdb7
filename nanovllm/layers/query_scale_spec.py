"""Attention whose queries are scaled by their position; no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.spec import AttentionSpec

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class ScaledQueryAttentionSpec(AttentionSpec):
    """The query at position p is multiplied with 1 + beta * log(1 + floor(p / original_length))."""

    beta: float
    original_length: int
    max_position: int

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.query_scale import ScaledQueryAttention

        return ScaledQueryAttention(self, context)
