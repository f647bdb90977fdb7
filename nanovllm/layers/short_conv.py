"""LFM2's gated short convolution: out(c * conv(b * h)), where (b, c, h) = in(x)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.causal_conv import causal_conv
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import part_of
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.short_conv_spec import ShortConvSpec


class ShortConv:
    def __init__(self, spec: "ShortConvSpec", context: BuildContext) -> None:
        self._group, self._weights = context.group, spec.weights()
        self.in_proj = Linear(part_of(self._weights, "in_"), context)
        self.o_proj = Linear(part_of(self._weights, "out_"), context)
        self._conv: dict[str, Tensor] = {}
        for name in self._weights.keys() & {"conv", "conv_bias"}:
            shape = self._weights[name].shard_shape(self._group.rank, self._group.size)
            self._conv[name] = torch.empty(shape, dtype=context.dtype, device=context.device)
        self._deterministic, self._pdl = context.deterministic, context.pdl
        self._kernel: Callable[..., Tensor] | None = None
        if context.kernels:
            from nanovllm.kernels.delta_net.causal_conv import causal_conv as kernel

            self._kernel = kernel

    def slots(self) -> dict[str, Slot]:
        found = self.in_proj.slots() | self.o_proj.slots()
        for name, tensor in self._conv.items():
            found |= slots_of(self._weights[name], DenseWeight(tensor), self._group.rank, self._group.size)
        return found

    def finish_loading(self) -> None:
        self.in_proj.finish_loading()
        self.o_proj.finish_loading()

    def mix(self, x: Residual, state: Tensor, step: Step, *, norm: RMSNorm) -> Tensor:
        seqs = step.sequences
        assert seqs is not None
        b, c, h = self.in_proj(x, norm=norm).chunk(3, dim=-1)
        weight, bias = self._conv["conv"], self._conv.get("conv_bias")
        if self._kernel is not None:
            # deterministic: one kernel computes a token, whatever the others of the step are
            few = not self._deterministic and seqs.have_few_tokens
            return self._kernel(h, weight, bias, state, seqs, times_and_after=(b, c), few=few, pdl=self._pdl)
        return c * causal_conv(b * h, weight, bias, state, seqs).to(c.dtype)
