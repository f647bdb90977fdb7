"""A mixture of experts beside one expert that every token passes, times sigmoid(gate(x)); no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.refine import refine
from nanovllm.layers.spec import Dim, MlpSpec, Weight

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext

EXPERT, GATE = "shared_expert", "shared_expert_gate"  # in checkpoints


@dataclass(frozen=True, kw_only=True)
class SharedExpertSpec(MoeSpec):
    shared_size: int  # intermediate size of the shared expert

    @property
    def shared(self) -> MlpSpec:
        return MlpSpec(hidden_size=self.hidden_size, intermediate_size=self.shared_size)

    def weights(self) -> dict[str, Weight]:
        own = self.shared.weights()
        shared = {
            f"shared_{name}": refine(Weight, weight, names=tuple(f"{EXPERT}.{stored}" for stored in weight.names))
            for name, weight in own.items()
        }
        gate = Weight((f"{GATE}.weight",), (Dim(1),), Dim(self.hidden_size))
        return super().weights() | shared | {"gate": gate}

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.shared_expert import SharedExpertMoE

        return SharedExpertMoE(self, context)
