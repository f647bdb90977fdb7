"""Self-attention of one layer: project, attend, project."""

import torch
from torch import Tensor

from nanovllm.attention.backend import LayerCache, QKNorm
from nanovllm.checkpoint.stored import Slot
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import part_of
from nanovllm.layers.residual import Residual
from nanovllm.layers.slots import slots_of
from nanovllm.layers.spec import AttentionSpec
from nanovllm.layers.step import Step
from nanovllm.weights.dense import DenseWeight


class Attention:
    def __init__(self, spec: AttentionSpec, context: BuildContext) -> None:
        self.window = spec.window
        self.backend = context.attention
        self._head_dim = spec.head_dim
        self._weights = spec.weights()
        self.qkv_proj = Linear(part_of(self._weights, "qkv_"), context)
        self.o_proj = Linear(part_of(self._weights, "o_"), context)
        self.q_norm = torch.ones(spec.head_dim, dtype=context.dtype, device=context.device)
        self.k_norm = torch.ones_like(self.q_norm)
        self._qk_norm: QKNorm | None = None
        if spec.qk_norm_eps is not None:
            own = spec.on_ranks(context.group.size)
            self._num_heads = own.num_heads
            both = self.q_norm.new_ones(own.num_heads + own.num_kv_heads, spec.head_dim)
            self._qk_norm = QKNorm(self.q_norm, self.k_norm, both, spec.qk_norm_eps)

    def slots(self) -> dict[str, Slot]:
        found = self.qkv_proj.slots() | self.o_proj.slots()
        if self._qk_norm is not None:
            found |= slots_of(self._weights["q_norm"], DenseWeight(self.q_norm))
            found |= slots_of(self._weights["k_norm"], DenseWeight(self.k_norm))
        return found

    def finish_loading(self) -> None:
        self.qkv_proj.finish_loading()
        self.o_proj.finish_loading()
        if self._qk_norm is not None:
            self._qk_norm.both[: self._num_heads] = self.q_norm
            self._qk_norm.both[self._num_heads :] = self.k_norm

    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm) -> Tensor:
        """[num_tokens, heads * head_dim]: what each token gathers from those before it; `o_proj` adds it to x."""
        qkv = self.qkv_proj(x, norm=norm).view(len(x), -1, self._head_dim)
        return self.backend.forward(qkv, self._qk_norm, state, step.attention, self.window)
