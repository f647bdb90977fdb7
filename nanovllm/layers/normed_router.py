"""A mixture of experts whose router norms its inputs, and whose experts have a factor each."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.moe import MoE
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.normed_router_spec import NormedRouterMoeSpec


class NormedRouterMoE(MoE):
    def __init__(self, spec: "NormedRouterMoeSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        self._norm = RMSNorm(self._weights["router_norm"], context, eps=spec.router_norm_eps)
        self._factors = torch.empty(spec.num_experts, dtype=context.dtype, device=context.device)
        self._scale = spec.hidden_size**-0.5
        self._route_few, self._route_tokens = None, None  # which have one norm, for router and experts

    def slots(self) -> dict[str, Slot]:
        found = super().slots() | self._norm.slots()
        return found | slots_of(self._weights["expert_factors"], DenseWeight(self._factors))

    def finish_loading(self) -> None:
        super().finish_loading()
        self._norm.finish_loading()

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(self._norm(x) * self._scale)
        return self._choose(logits, self.num_experts_per_token, normalize=self.norm_topk_prob, factors=self._factors)
