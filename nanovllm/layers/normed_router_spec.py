"""A mixture of experts whose router norms its inputs, and whose experts have a factor each; no torch."""

from dataclasses import dataclass

from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.spec import Dim, Weight


@dataclass(frozen=True, kw_only=True)
class NormedRouterMoeSpec(MoeSpec):
    router_norm_eps: float

    def weights(self) -> dict[str, Weight]:
        return super().weights() | {
            "router_norm": Weight(("router.scale",), (Dim(self.hidden_size),)),
            "expert_factors": Weight(("router.per_expert_scale",), (Dim(self.num_experts),)),
        }
