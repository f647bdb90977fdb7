"""Multi-head latent attention (MLA) of DeepSeek: a token's keys and values of all heads are computed from one small
vector, the latent, and the cache holds only this vector and one rotated key that all heads share. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.refine import refine
from nanovllm.layers.spec import AttentionSpec, Dim, Weight, linear_weights
from nanovllm.layers.stored_spec import StoredWeight, head_order
from nanovllm.state import DTYPE_BYTES, PagedState

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext

LATENT = "kv_a_proj_with_mqa"  # in checkpoints: the rows of the latent, then those of the rotated key


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Attention with one KV head of `head_dim` = latent_size + rotated_size numbers, from which each head makes its key
    of plain_size + rotated_size numbers and its value."""

    latent_size: int
    rotated_size: int  # numbers of a query or key that are rotated, the last ones
    plain_size: int  # and of those that are not
    value_size: int  # numbers of a head's value
    query_rank: int | None  # queries are projected through as many numbers, with a norm; None = directly
    latent_norm_eps: float  # of the norms of the latent and of these numbers
    interleaved: bool  # checkpoints have the two numbers that are rotated together side by side

    @property
    def query_size(self) -> int:
        return self.plain_size + self.rotated_size

    @property
    def flops_per_score(self) -> int:
        """For a pair of a query and a key in a prompt, where keys and values of all heads are made."""
        return 2 * self.num_heads * (self.query_size + self.value_size)

    def weights(self) -> dict[str, Weight]:
        hidden, rotated = Dim(self.hidden_size), self.rotated_size
        order = head_order(rotated, rotated, interleaved=self.interleaved)
        whole = (*range(self.plain_size), *(self.plain_size + place for place in order))
        queries = Dim(self.num_heads, self.query_size, "attention heads", order=whole)
        latent, key = Dim(self.latent_size), Dim(1, rotated, order=order)
        first = ("q_proj", queries) if self.query_rank is None else ("q_a_proj", Dim(self.query_rank))
        inputs = linear_weights((first[0], LATENT, LATENT), (first[1], latent, key), hidden, prefix="in_")
        found: dict[str, Weight] = {"in_weight": refine(StoredWeight, inputs["in_weight"])}
        if self.query_rank is not None:
            q = linear_weights(("q_b_proj",), (queries,), Dim(self.query_rank), prefix="q_")
            found |= {
                "q_weight": refine(StoredWeight, q["q_weight"]),
                "q_norm": Weight(("q_a_layernorm.weight",), (Dim(self.query_rank),)),
            }
        both = Dim(self.num_heads, self.plain_size + self.value_size, "attention heads")
        values = Dim(self.num_heads, self.value_size, "attention heads")
        return found | {
            "latent_norm": Weight(("kv_a_layernorm.weight",), (latent,)),
            # not packable: in decode steps its parts are factors of queries and results, not of a linear's inputs
            "kv_b": Weight(("kv_b_proj.weight",), (both,), latent),
            **linear_weights(("o_proj",), (hidden,), values, prefix="o_"),
        }

    def state(self, dtype: str, num_ranks: int = 1) -> PagedState:
        """The same on every rank: all heads read the whole latent."""
        return PagedState(bytes_per_token=self.head_dim * DTYPE_BYTES[dtype])

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.latent_attention import LatentAttention

        return LatentAttention(self, context)

    def make_backend(self, config: Any, layers: Sequence[AttentionSpec], **settings: Any) -> Any:
        """The backend of a model with such layers; see attention/select.py."""
        from nanovllm.attention.select_latent import make_latent_backend

        return make_latent_backend(config, layers, latent_size=self.latent_size, plain_size=self.plain_size, **settings)
