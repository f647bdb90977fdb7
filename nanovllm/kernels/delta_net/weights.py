"""What the kernels of a gated delta net need to know of a layer."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class DeltaNetShape:
    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel_size: int  # of the convolution
    eps: float  # of the norm

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class DeltaNetWeights(NamedTuple):
    conv: Tensor  # [channels, 1, kernel_size]
    dt_bias: Tensor  # [value_heads] float32
    A_log: Tensor  # [value_heads] float32
    norm: Tensor  # [value_dim]
