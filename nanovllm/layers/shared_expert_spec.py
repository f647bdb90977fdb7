"""A mixture of experts beside one expert that every token passes, maybe times sigmoid(gate(x)); no torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.spec import Dim, MlpSpec, Weight

if TYPE_CHECKING:
    from nanovllm.layers.context import BuildContext


@dataclass(frozen=True, kw_only=True)
class SharedExpertSpec(MoeSpec):
    shared_size: int  # intermediate size of the shared expert; 0 = there is none
    shared_name: str = "shared_expert"  # in checkpoints
    gated: bool = True

    @property
    def shared(self) -> MlpSpec:
        return MlpSpec(hidden_size=self.hidden_size, intermediate_size=self.shared_size)

    def weights(self) -> dict[str, Weight]:
        if not self.shared_size:
            return super().weights()
        own = self.shared.weights()
        shared = {
            f"shared_{name}": replace(weight, names=tuple(f"{self.shared_name}.{stored}" for stored in weight.names))
            for name, weight in own.items()
        }
        gate = Weight((f"{self.shared_name}_gate.weight",), (Dim(1),), Dim(self.hidden_size))
        return super().weights() | shared | ({"gate": gate} if self.gated else {})

    def build(self, context: "BuildContext") -> Any:
        from nanovllm.layers.shared_expert import SharedExpertMoE

        return SharedExpertMoE(self, context)
