"""The mixture of experts of DeepSeek: experts are chosen among those of the best groups."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.linear import Linear
from nanovllm.layers.shared_expert import SharedExpertMoE
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec


class GroupedMoE(SharedExpertMoE):
    """The router computes in float32, as the reference does: experts whose scores are close would be exchanged."""

    chooses_plainly = False

    def __init__(self, spec: "GroupedMoeSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        self._spec = spec
        self.router = Linear({"weight": self._weights["router"]}, replace(context, dtype=torch.float32))
        self._bias_of_choice: Tensor | None = None
        if "choice_bias" in self._weights:
            self._bias_of_choice = torch.empty(spec.num_experts, dtype=torch.float32, device=context.device)
        self._route_tokens = None  # which knows neither groups nor sigmoid scores
        self._in_one_launch: Callable[..., tuple[Tensor, Tensor]] | None = None
        if context.kernels:
            from nanovllm.kernels.moe.route_groups import route_in_groups
            from nanovllm.kernels.moe.route_rows import Choice

            choice = Choice(
                top_k=spec.num_experts_per_token,
                normalize=spec.norm_topk_prob,
                num_groups=spec.num_groups,
                num_chosen_groups=spec.num_chosen_groups,
                scaling=spec.scaling,
                least_sum=spec.least_sum,
            )
            self._in_one_launch = partial(route_in_groups, **choice._asdict(), dtype=context.dtype, pdl=context.pdl)
            if self._route_few is not None:
                self._route_few = partial(self._route_few, choice=choice)

    def slots(self) -> dict[str, Slot]:
        found = super().slots()
        if self._bias_of_choice is not None:
            found |= slots_of(self._weights["choice_bias"], DenseWeight(self._bias_of_choice))
        return found

    def _router_weights(self) -> dict[str, Tensor | None]:
        return super()._router_weights() | {"bias_of_choice": self._bias_of_choice}

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x.float())
        if self._in_one_launch is not None:
            return self._in_one_launch(logits, self._bias_of_choice)
        weights, experts = choose_in_groups(logits, self._spec, self._bias_of_choice)
        return weights.to(x.dtype), experts.int()


def choose_in_groups(logits: Tensor, spec: "GroupedMoeSpec", bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """[num_tokens, experts] -> weights and experts, [num_tokens, k]. `bias`: [experts], for the choice.

    kernels/moe/route_groups.py does it in one launch.
    """
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(dim=-1)
    ranking = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        groups = ranking.unflatten(1, (spec.num_groups, -1))  # [num_tokens, groups, experts of a group]
        best = groups.topk(2 if spec.scoring == "sigmoid" else 1, dim=-1).values.sum(dim=-1)
        chosen = best.topk(spec.num_chosen_groups, dim=-1).indices
        others = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
        ranking = groups.masked_fill(others.unsqueeze(-1), float("-inf")).flatten(1)
    experts = ranking.topk(spec.num_experts_per_token, dim=-1).indices
    weights = scores.gather(1, experts)
    if spec.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + spec.least_sum)
    return weights * spec.scaling, experts
