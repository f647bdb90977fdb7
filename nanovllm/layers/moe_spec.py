"""What a mixture of experts states about itself; no torch."""

from dataclasses import dataclass
from typing import Any

from nanovllm.layers.spec import Dim, Weight


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """A mixture of experts: each token passes the `num_experts_per_token` that a router picks."""

    hidden_size: int
    intermediate_size: int  # of one expert
    num_experts: int
    num_experts_per_token: int
    norm_topk_prob: bool

    def weights(self) -> dict[str, Weight]:
        hidden, columns = Dim(self.hidden_size), Dim(self.intermediate_size, divided="columns of an expert")
        experts: dict[str, Any] = {
            "num_experts": self.num_experts,
            "num_active": self.num_experts_per_token,
            "packable": True,
        }
        gate_up = ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
        return {
            "router": Weight(("gate.weight",), (Dim(self.num_experts),), hidden),
            "gate_up": Weight(gate_up, (columns, columns), hidden, **experts),
            "down": Weight(("experts.{}.down_proj.weight",), (hidden,), columns, **experts),
        }
