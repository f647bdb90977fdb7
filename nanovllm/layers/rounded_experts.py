"""Experts with fp8 weights on Hopper: the launch of the norm before the router rounds their inputs, too, and the next
norm adds their results to the residual."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.moe.fp8_experts import fp8_expert_sums
from nanovllm.kernels.moe.fp8_slots import norm_and_round
from nanovllm.kernels.moe.packed import fp8_serves
from nanovllm.kernels.moe.tiles import SINGLE_TOKENS
from nanovllm.kernels.moe.weights import PackedExperts
from nanovllm.layers.layernorm import RMSNorm

if TYPE_CHECKING:
    from nanovllm.kernels.moe.route_rows import Routed


class RoundedExperts:
    def __init__(self, form: dict[str, Any], *, pdl: bool) -> None:
        """`form`: the activation, as the kernels are told it."""
        self._form, self._pdl = form, pdl

    def serves(self, gate_up: Tensor | PackedWords, down: Tensor | PackedWords, **biases: Any) -> bool:
        if not isinstance(gate_up, PackedWords) or not isinstance(down, PackedWords):
            return False
        return fp8_serves(PackedExperts(gate_up, down, **biases))

    def __call__(
        self,
        x: Any,  # a residual stream that can add later
        norm: RMSNorm,
        route: Callable[[Tensor], tuple[Tensor, Tensor]],
        routed_few: "Callable[..., Routed]",  # norm, router and choice in one launch
        gate_up: PackedWords,
        down: PackedWords,
    ) -> Any:
        layer = PackedExperts(gate_up, down, **self._form)
        if len(x) <= SINGLE_TOKENS:
            routed = routed_few(x, norm, rounded_for=gate_up)
            rounded, weights, experts = routed.rounded, routed.weights, routed.experts
            assert rounded is not None
        else:
            rows, partial_sums = x.take()
            normed, rounded = norm_and_round(
                rows, norm.weight, norm.eps, gate_up, partial_sums=partial_sums, pdl=self._pdl
            )
            weights, experts = route(normed)
        x.add_later(fp8_expert_sums(rounded, layer, weights, experts, by_choice=True, pdl=self._pdl))
        return x
