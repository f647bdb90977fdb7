"""A layer of Gemma 4: norms before and after each part, experts beside the MLP, an input of its own for each token, and
a factor at the end."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.normed_router import NormedRouterMoE
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import norm_weight
from nanovllm.layers.step import Step
from nanovllm.models.post_norm import SandwichLayer
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.part import Part
    from nanovllm.models.gemma4_layer_spec import Gemma4LayerSpec


class Factor:
    """One learned number."""

    def __init__(self, context: BuildContext) -> None:
        self.value = torch.ones(1, dtype=context.dtype, device=context.device)

    def slots(self) -> dict[str, Slot]:
        return slots_of(norm_weight(1), DenseWeight(self.value))

    def finish_loading(self) -> None:
        """It is used as it was loaded."""


class GatedInput:
    """norm(projection(gelu(gate(x)) * input)); `parts` by name in checkpoints."""

    def __init__(self, spec: "Gemma4LayerSpec", context: BuildContext) -> None:
        (gate, gate_weight), (projection, weight), (norm, of_norm) = spec.input_weights().items()
        self._gate = Linear({"weight": gate_weight}, context.within(f"{gate}."))
        self._projection = Linear({"weight": weight}, context.within(f"{projection}."))
        self._norm = RMSNorm(of_norm, context, eps=spec.norm_eps)
        self.parts: dict[str, Part] = {gate: self._gate, projection: self._projection, norm: self._norm}

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:  # [num_tokens, hidden], [num_tokens, input_size]
        gated = F.gelu(self._gate(x), approximate="tanh") * inputs
        return self._norm(self._projection(gated))


class NormedExperts:
    """norm(experts(norm(x))), and the norm of the MLP beside them; `parts` by name in checkpoints."""

    def __init__(self, spec: "Gemma4LayerSpec", context: BuildContext) -> None:
        assert spec.experts is not None
        self._moe = NormedRouterMoE(spec.experts, context.within(f"{spec.experts_name}."))
        norms = [RMSNorm(norm_weight(spec.hidden_size), context, eps=spec.norm_eps) for _ in spec.expert_norms]
        self.norm_mlp, self._before, self._after = norms
        self.parts: dict[str, Part] = {spec.experts_name: self._moe, **dict(zip(spec.expert_norms, norms, strict=True))}

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, hidden]
        return self._after(self._moe.sum_experts(self._before(x), routed_by=x))


class Gemma4Layer(SandwichLayer):
    def __init__(self, spec: "Gemma4LayerSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        self._index = spec.index
        self._experts = NormedExperts(spec, context) if spec.experts is not None else None
        self._input = GatedInput(spec, context) if spec.input_size else None
        self._factor = Factor(context)

    def __call__(self, x: Residual, state: Any, step: Step, wanted: Tensor | None = None) -> Residual:
        x = super().__call__(x, state, step, wanted)
        if self._input is not None and len(x):
            inputs = step.layer_inputs[:, self._index]
            x.rows = x.rows + self._input(x.rows, inputs if wanted is None else inputs[wanted])
        x.rows = x.rows * self._factor.value
        return x

    def _fed_forward(self, x: Residual) -> Tensor:
        mlp = super()._fed_forward(x)
        return mlp if self._experts is None else self._experts.norm_mlp(mlp) + self._experts(x.rows)

    def parts(self) -> "dict[str, Part]":
        found = super().parts() | {"layer_scalar": self._factor}
        for more in (self._experts, self._input):
            found |= {} if more is None else more.parts
        return found
