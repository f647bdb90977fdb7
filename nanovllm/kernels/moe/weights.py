"""The weights of a layer's experts, as the kernels take them."""

from typing import NamedTuple

from torch import Tensor

from nanovllm.kernels.linear.packed import PackedWords


class ExpertWeights(NamedTuple):
    """The experts of one layer. int8 weights have one scale per output row: a row stands for row * scale."""

    gate_up: Tensor  # [E, 2 * I, H]
    down: Tensor  # [E, H, I]
    gate_up_scale: Tensor | None = None  # [E, 2 * I] float32
    down_scale: Tensor | None = None  # [E, H] float32
    gate_up_bias: Tensor | None = None  # [E, 2 * I]
    down_bias: Tensor | None = None  # [E, H]
    alpha: float = 1.0  # and limit: of the clamped activation
    limit: float = 0.0  # 0 = silu(gate) * up
    gelu: bool = False  # gelu(gate) * up, in its approximation with tanh


class PackedExperts(NamedTuple):
    """The experts of one layer, packed."""

    gate_up: PackedWords  # [E, 2 * I, H]
    down: PackedWords  # [E, H, I]
    gate_up_bias: Tensor | None = None  # [E, 2 * I]
    down_bias: Tensor | None = None  # [E, H]
    alpha: float = 1.0  # and limit: of the clamped activation
    limit: float = 0.0  # 0 = silu(gate) * up
    gelu: bool = False  # gelu(gate) * up, in its approximation with tanh
