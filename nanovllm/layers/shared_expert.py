"""A mixture of experts beside one expert that every token passes, maybe times sigmoid(gate(x))."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import part_of
from nanovllm.layers.moe import MoE
from nanovllm.layers.residual import Residual
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.shared_expert_spec import SharedExpertSpec


class SharedExpertMoE(MoE):
    def __init__(self, spec: "SharedExpertSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        shared = part_of(self._weights, "shared_")
        self._shared: list[Linear] = []  # gate_up and down
        if shared:
            self._shared = [Linear(part_of(shared, name), context) for name in ("gate_up_", "down_")]
        self.shared_gate: Tensor | None = None
        if spec.gated:
            self.shared_gate = torch.empty((1, spec.hidden_size), dtype=context.dtype, device=context.device)

    def slots(self) -> dict[str, Slot]:
        found = super().slots()
        for linear in self._shared:
            found |= linear.slots()
        if self.shared_gate is not None:
            found |= slots_of(self._weights["gate"], DenseWeight(self.shared_gate))
        return found

    def finish_loading(self) -> None:
        super().finish_loading()
        for linear in self._shared:
            linear.finish_loading()

    def __call__(self, x: Residual, *, norm: RMSNorm) -> Residual:
        if not self._shared:
            return super().__call__(x, norm=norm)
        gate_up, down = self._shared
        normed = x.normed(norm)
        hidden = gate_up(normed, activation="silu")
        if self.shared_gate is None:
            return self._add_experts(down(hidden, add_to=x), normed)
        shared = down(hidden) * F.linear(normed, self.shared_gate).sigmoid()
        x = self._add_experts(x, normed)
        x.rows = x.rows + shared
        return x
