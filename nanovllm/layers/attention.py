"""Self-attention of one layer: project, attend, project."""

import torch
from torch import Tensor

from nanovllm.attention.backend import LayerAttention, LayerCache
from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import part_of
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import AttentionSpec
from nanovllm.layers.step import Step
from nanovllm.weights.dense import DenseWeight


class Attention:
    def __init__(self, spec: AttentionSpec, context: BuildContext) -> None:
        self._own = spec.on_ranks(context.group.size)
        self._weights = spec.weights()
        self._backend = context.attention
        self.qkv_proj = Linear(part_of(self._weights, "qkv_"), context)
        self.o_proj = Linear(part_of(self._weights, "o_"), context)
        self._norms: dict[str, Tensor] = {}
        if spec.qk_norm_eps is not None:
            size = (self._own.num_heads + self._own.num_kv_heads, spec.head_dim)
            dtype = context.dtype if spec.qk_norm_offset is None else torch.float32
            both = torch.ones(size, dtype=dtype, device=context.device)
            self._norms = {"q_norm": both[0].clone(), "k_norm": both[0].clone(), "both_norms": both}
        self._layer = LayerAttention(
            scale=spec.score_scale,
            window=spec.window,
            rope=context.ropes.index(spec.rope),
            norm_eps=spec.qk_norm_eps or 0.0,
            **self._norms,
        )

    def slots(self) -> dict[str, Slot]:
        found = self.qkv_proj.slots() | self.o_proj.slots()
        for name in self._norms.keys() & self._weights.keys():
            found |= slots_of(self._weights[name], DenseWeight(self._norms[name]))
        return found

    def finish_loading(self) -> None:
        self.qkv_proj.finish_loading()
        self.o_proj.finish_loading()
        if self._norms:
            self._norms["both_norms"][: self._own.num_heads] = self._norms["q_norm"]
            self._norms["both_norms"][self._own.num_heads :] = self._norms["k_norm"]

    def mix(self, x: Residual, state: LayerCache, step: Step, *, norm: RMSNorm) -> Tensor:
        """[num_tokens, heads * head_dim]: what each token gathers from those before it; `o_proj` adds it to x."""
        return self.attend(self.qkv_proj(x, norm=norm), state, step)

    def attend(self, qkv: Tensor, state: LayerCache, step: Step) -> Tensor:
        """`mix` of what `qkv_proj` gives."""
        return self._backend.forward(qkv.view(len(qkv), -1, self._own.head_dim), self._layer, state, step.attention)
