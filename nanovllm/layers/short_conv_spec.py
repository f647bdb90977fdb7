"""LFM2's gated short convolution: out(c * conv(b * h)), where (b, c, h) = in(x); no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.conv_spec import ConvWeight
from nanovllm.layers.refine import refine
from nanovllm.layers.spec import Dim, Weight, linear_weights
from nanovllm.layers.stored_spec import StoredWeight
from nanovllm.row_state import RowState

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    hidden_size: int
    kernel_size: int
    bias: bool = False

    def weights(self) -> dict[str, Weight]:
        hidden, channels = Dim(self.hidden_size), Dim(self.hidden_size, divided="channels of the convolution")
        inputs = linear_weights(("in_proj",) * 3, (channels,) * 3, hidden, bias=self.bias, prefix="in_")
        found: dict[str, Weight] = {name: refine(StoredWeight, weight) for name, weight in inputs.items()}
        found |= linear_weights(("out_proj",), (hidden,), channels, bias=self.bias, prefix="out_")
        found["conv"] = ConvWeight(("conv.weight",), (channels,), Dim(self.kernel_size))
        if self.bias:
            found["conv_bias"] = Weight(("conv.bias",), (channels,))
        return found

    def state(self, dtype: str, num_ranks: int = 1) -> RowState:
        """The newest inputs of the convolution."""
        return RowState((self.kernel_size - 1, self.hidden_size // num_ranks))

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.short_conv import ShortConv

        return ShortConv(self, context)
