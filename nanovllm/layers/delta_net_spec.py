"""The gated delta net of Qwen3-Next and Qwen3.5: a causal convolution, and a matrix per value head that every token
decays and corrects; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.layers.conv_spec import ConvWeight
from nanovllm.layers.refine import refine
from nanovllm.layers.spec import Dim, TensorPart, Weight, linear_weights
from nanovllm.layers.stored_spec import StoredWeight
from nanovllm.row_state import RowState

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


class ByKeyHead(StoredWeight):
    """A tensor that has the rows of all parts for one key head, then those for the next."""

    def parts(self, rank: int, num_ranks: int) -> Iterator[TensorPart]:
        num_heads = self.rows[0].count
        sizes = [rows.size // num_heads for rows in self.rows]
        begins = [sum(sizes[:index]) for index in range(len(sizes))]
        order = [
            head * sum(sizes) + begin + row
            for begin, size in zip(begins, sizes, strict=True)
            for head in range(num_heads)
            for row in range(size)
        ]
        for part in super().parts(rank, num_ranks):
            yield replace(part, order=tuple(order))


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec:
    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel_size: int
    norm_eps: float
    by_key_head: bool = False  # Qwen3-Next: checkpoints have in_proj_qkvz and in_proj_ba, ordered by key head

    def on_ranks(self, num_ranks: int) -> "DeltaNetSpec":
        """With the heads that each of `num_ranks` tensor parallel ranks computes."""
        keys, values = self.num_key_heads // num_ranks, self.num_value_heads // num_ranks
        return replace(self, num_key_heads=keys, num_value_heads=values)

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def weights(self) -> dict[str, Weight]:
        hidden, per_key = Dim(self.hidden_size), self.num_value_heads // self.num_key_heads
        keys = Dim(self.num_key_heads, self.key_dim, "key heads of the delta net")
        # divided with the key heads that they belong to
        values = Dim(self.num_key_heads, per_key * self.value_dim, keys.divided)
        heads = Dim(self.num_key_heads, per_key, keys.divided)
        stored = ByKeyHead if self.by_key_head else StoredWeight
        names = ("in_proj_qkvz",) * 4 if self.by_key_head else ("in_proj_qkv",) * 3 + ("in_proj_z",)
        inputs = linear_weights(names, (keys, keys, values, values), hidden, prefix="in_")
        two = ("in_proj_ba",) * 2 if self.by_key_head else ("in_proj_b", "in_proj_a")
        gates = Weight(tuple(f"{name}.weight" for name in two), (heads, heads), hidden)
        return {
            "in_weight": refine(stored, inputs["in_weight"]),
            "gates_weight": refine(stored, gates),
            **linear_weights(("out_proj",), (hidden,), values, prefix="out_"),
            "conv": ConvWeight(("conv1d.weight",) * 3, (keys, keys, values), Dim(self.kernel_size)),
            "dt_bias": Weight(("dt_bias",), (heads,)),
            "A_log": Weight(("A_log",), (heads,)),
            "norm": Weight(("norm.weight",), (Dim(self.value_dim),)),
        }

    def state(self, dtype: str, num_ranks: int = 1) -> RowState:
        """The newest inputs of the convolution, then [value heads, key_dim, value_dim]; in float32."""
        own = self.on_ranks(num_ranks)
        matrices = own.num_value_heads * self.key_dim * self.value_dim
        return RowState(((self.kernel_size - 1) * own.num_channels + matrices,))

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.delta_net import DeltaNet

        return DeltaNet(self, context)
