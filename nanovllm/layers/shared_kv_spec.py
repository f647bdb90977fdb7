"""Attention that reads the keys and values of an earlier layer and has none of its own; no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.spec import AttentionSpec, Weight, linear_weights
from nanovllm.state import PagedState

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class SharedKvAttentionSpec:
    attention: AttentionSpec  # the earlier layer's; heads, window and rotary positions are the same
    index: int  # of this layer in the model
    source: int  # index of the earlier layer

    def weights(self) -> dict[str, Weight]:
        whole = self.attention.weights()
        queries, *_ = whole["qkv_weight"].rows
        hidden = whole["qkv_weight"].columns
        assert hidden is not None
        found = linear_weights(("q_proj",), (queries,), hidden, bias=self.attention.qkv_bias, prefix="query_")
        return found | {name: whole[name] for name in ("o_weight", "o_bias", "q_norm") if name in whole}

    def state(self, dtype: str, num_ranks: int = 1) -> PagedState:
        return PagedState(bytes_per_token=0, window=self.attention.window, source=self.index - self.source)

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.shared_kv import SharedKvAttention

        return SharedKvAttention(self, context)
