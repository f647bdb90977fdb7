"""Experts with fp8 weights on Hopper: the launch of the norm before the router rounds their inputs, too, and the next
norm adds their results to the residual."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.tiled import split_k_linear
from nanovllm.kernels.moe.fp8_experts import blocks_of, fp8_expert_sums
from nanovllm.kernels.moe.fp8_slots import norm_and_round
from nanovllm.kernels.moe.packed import fp8_serves
from nanovllm.kernels.moe.route_blocks import blocks_serve, route_blocks
from nanovllm.kernels.moe.tiles import SINGLE_TOKENS, fp8_expert_tiles
from nanovllm.kernels.moe.weights import PackedExperts
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear

if TYPE_CHECKING:
    from nanovllm.kernels.moe.route_rows import Routed


class RoundedExperts:
    def __init__(self, form: dict[str, Any], *, top_k: int, normalize: bool, arrived: Tensor, pdl: bool) -> None:
        """`form`: the kernels' arguments for the activation. `top_k` and `normalize`: how experts are chosen.
        `arrived`: a counter for `route_blocks`."""
        self._form, self._top_k, self._normalize = form, top_k, normalize
        self._arrived, self._pdl = arrived, pdl

    def serves(self, gate_up: Tensor | PackedWords, down: Tensor | PackedWords, **biases: Any) -> bool:
        if not isinstance(gate_up, PackedWords) or not isinstance(down, PackedWords):
            return False
        return fp8_serves(PackedExperts(gate_up, down, **biases))

    def __call__(
        self,
        x: Any,  # a residual stream that can add later
        norm: RMSNorm,
        gate_up: PackedWords,
        down: PackedWords,
        *,
        router: Linear | None,  # None: the choice is not a plain one
        route: Callable[[Tensor], tuple[Tensor, Tensor]],
        routed_few: "Callable[..., Routed]",  # norm, router and choice in one launch
    ) -> Any:
        pdl, num_experts = self._pdl, down.shape[0]
        tiles = fp8_expert_tiles(len(x), num_experts, self._top_k)
        if len(x) <= SINGLE_TOKENS:
            routed = routed_few(x, norm, rounded_for=gate_up)
            rounded, weights = routed.rounded, routed.weights
            blocks = blocks_of(routed.experts, num_experts, tiles[0], pdl=pdl)
            assert rounded is not None
        else:
            rows, sums = x.take()
            normed, rounded = norm_and_round(rows, norm.weight, norm.eps, gate_up, partial_sums=sums, pdl=pdl)
            choice: dict[str, Any] = {"normalize": self._normalize, "block_m": tiles[0].block_m, "pdl": pdl}
            if router is not None and blocks_serve(len(x), num_experts):
                weights, blocks = route_blocks(router(normed), self._top_k, **choice)
            elif router is not None and blocks_serve(len(x), num_experts, several=True):
                sums = split_k_linear(normed, router.weight.kernel_arguments()["weight"], router.bias, pdl=pdl)
                choice |= {"dtype": normed.dtype, "arrived": self._arrived}
                weights, blocks = route_blocks(sums, self._top_k, **choice)
            else:
                weights, experts = route(normed)
                blocks = blocks_of(experts, num_experts, tiles[0], pdl=pdl)
        layer = PackedExperts(gate_up, down, **self._form)
        x.add_later(fp8_expert_sums(rounded, layer, weights, blocks, tiles, by_choice=True, pdl=pdl))
        return x
