"""What a mixture of experts states about itself; no torch."""

from dataclasses import dataclass
from typing import Any

from nanovllm.layers.spec import Activation, Dim, Weight


@dataclass(frozen=True, kw_only=True)
class ClampedGlu:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up between -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """A mixture of experts: each token passes the `num_experts_per_token` that a router picks."""

    hidden_size: int
    intermediate_size: int  # of one expert
    num_experts: int
    num_experts_per_token: int
    norm_topk_prob: bool
    activation: ClampedGlu | Activation = "silu"
    bias: bool = False  # of the router and of every expert
    router_name: str = "gate"  # in checkpoints

    def weights(self) -> dict[str, Weight]:
        hidden, columns = Dim(self.hidden_size), Dim(self.intermediate_size, divided="columns of an expert")
        experts: dict[str, Any] = {"num_experts": self.num_experts, "num_active": self.num_experts_per_token}
        router, gate_up = (Dim(self.num_experts),), ("experts.{}.gate_proj", "experts.{}.up_proj")

        def named(kind: str, *modules: str) -> tuple[str, ...]:
            return tuple(f"{module}.{kind}" for module in modules)

        found = {
            "router": Weight(named("weight", self.router_name), router, hidden),
            "gate_up": Weight(named("weight", *gate_up), (columns, columns), hidden, packable=True, **experts),
            "down": Weight(named("weight", "experts.{}.down_proj"), (hidden,), columns, packable=True, **experts),
        }
        if self.bias:
            down = Weight(named("bias", "experts.{}.down_proj"), (hidden,), on_first_rank=True, **experts)
            found |= {
                "router_bias": Weight(named("bias", self.router_name), router),
                "gate_up_bias": Weight(named("bias", *gate_up), (columns, columns), **experts),
                "down_bias": down,  # the ranks' results are summed, and it must be added once
            }
        return found
