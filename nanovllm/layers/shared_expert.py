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
        self._most_with_shared = 0  # tokens for which the shared expert is computed in the launches of the others
        weights = [self.gate_up, self.down, *(linear.weight for linear in self._shared)]
        if context.kernels and not context.deterministic and {one.format_name for one in weights} == {"dense"}:
            from nanovllm.kernels.moe.experts import ROW_TOKENS

            self._most_with_shared = ROW_TOKENS

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
        if self._route_few is not None and 0 < len(x) <= self._most_with_shared:
            return self._add_both(x, norm)
        gate_up, down = self._shared
        normed = x.normed(norm)
        hidden = gate_up(normed, activation="silu")
        if self.shared_gate is None:
            return self._add_experts(down(hidden, add_to=x), normed, *self._route(normed))
        shared = down(hidden) * F.linear(normed, self.shared_gate).sigmoid()
        x = self._add_experts(x, normed, *self._route(normed))
        x.rows = x.rows + shared
        return x

    def _add_both(self, x: Residual, norm: RMSNorm) -> Residual:
        """In three launches: what needs no chosen expert; gate and up of the chosen ones; down of all."""
        gate_up, down = (linear.weight.kernel_arguments()["weight"] for linear in self._shared)
        routed = self._routed_few(x, norm, shared_gate_up=gate_up, shared_gate=self.shared_gate)
        assert routed.shared is not None
        return self._add_experts(x, routed.normed, routed.weights, routed.experts, shared=(routed.shared, down))
