"""The feed-forward part of a layer: x + down(activation(gate(norm(x))) * up(norm(x)))."""

from nanovllm.checkpoint.stored import Slot
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import MlpSpec, Weight


class MLP:
    def __init__(self, spec: MlpSpec, context: BuildContext) -> None:
        weights, self.activation = spec.weights(), spec.activation
        self.gate_up_proj = Linear(part_of(weights, "gate_up_"), context)
        self.down_proj = Linear(part_of(weights, "down_"), context)

    def __call__(self, x: Residual, *, norm: RMSNorm) -> Residual:
        return self.down_proj(self.gate_up_proj(x, norm=norm, activation=self.activation), add_to=x)

    def slots(self) -> dict[str, Slot]:
        return self.gate_up_proj.slots() | self.down_proj.slots()

    def finish_loading(self) -> None:
        self.gate_up_proj.finish_loading()
        self.down_proj.finish_loading()


def part_of(weights: dict[str, Weight], prefix: str) -> dict[str, Weight]:
    """The weights whose names start with `prefix`, without it: those of one linear."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
