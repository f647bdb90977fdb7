"""The gated delta net of Qwen3-Next and Qwen3.5: its plain form on torch, or our kernels where they run."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.kernels.select import delta_net_serves
from nanovllm.layers import delta_rule
from nanovllm.layers.causal_conv import causal_conv
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import part_of
from nanovllm.layers.residual import Residual
from nanovllm.layers.sequences import Sequences
from nanovllm.layers.step import Step
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.layers.delta_net_kernels import DeltaNetKernels
    from nanovllm.layers.delta_net_spec import DeltaNetSpec

IN_FLOAT32 = ("dt_bias", "A_log")
L2_EPS = 1e-6


class DeltaNet:
    def __init__(self, spec: "DeltaNetSpec", context: BuildContext) -> None:
        self._group, self._weights = context.group, spec.weights()
        self._own, self._eps = spec.on_ranks(context.group.size), spec.norm_eps
        self._chunks = delta_rule.steps if context.deterministic else delta_rule.chunks
        self.in_proj = Linear(part_of(self._weights, "in_"), context)
        self.gates_proj = Linear(part_of(self._weights, "gates_"), context)
        self.o_proj = Linear(part_of(self._weights, "out_"), context)
        dense = {self.in_proj.weight.format_name, self.gates_proj.weight.format_name} == {"dense"}
        self._one_row_fuses = context.kernels and not context.deterministic and dense  # linears and norm
        self.held: dict[str, Tensor] = {}  # weights that are not those of linears
        for name in ("conv", "norm", *IN_FLOAT32):
            shape = self._weights[name].shard_shape(self._group.rank, self._group.size)
            dtype = torch.float32 if name in IN_FLOAT32 else context.dtype
            self.held[name] = torch.empty(shape, dtype=dtype, device=context.device)
        self._kernels: DeltaNetKernels | None = None
        if context.kernels and delta_net_serves(spec.key_dim, spec.value_dim):
            from nanovllm.layers import delta_net_kernels

            self._kernels = delta_net_kernels.DeltaNetKernels(
                self._own, self.held, deterministic=context.deterministic, pdl=context.pdl
            )

    def slots(self) -> dict[str, Slot]:
        found = self.in_proj.slots() | self.gates_proj.slots() | self.o_proj.slots()
        for name, tensor in self.held.items():
            found |= slots_of(self._weights[name], DenseWeight(tensor), self._group.rank, self._group.size)
        return found

    def finish_loading(self) -> None:
        for linear in (self.in_proj, self.gates_proj, self.o_proj):
            linear.finish_loading()

    def mix(self, x: Residual, state: Tensor, step: Step, *, norm: RMSNorm) -> Tensor:
        assert step.sequences is not None
        if self._one_row_fuses and len(x) == 1:  # its norm is computed twice, which takes less than a launch
            projected = self.in_proj(x, norm=norm), self.gates_proj(x, norm=norm)
        else:
            normed = x.normed(norm)
            projected = self.in_proj(normed), self.gates_proj(normed)
        parts = *projected, state, step.sequences
        return self.compute(*parts) if self._kernels is None else self._kernels(*parts)

    def compute(self, inputs: Tensor, gates: Tensor, state: Tensor, sequences: Sequences) -> Tensor:
        """What is between the projections.

        `inputs`: [num_tokens, channels + z]. `gates`: [num_tokens, 2 * value heads], b and a. `state`: [rows, size].
        """
        own = self._own
        channels, z = inputs.split([own.num_channels, own.num_value_heads * own.value_dim], dim=-1)
        b, a = gates.float().chunk(2, dim=-1)
        kept = state[:, : (own.kernel_size - 1) * own.num_channels].unflatten(1, (own.kernel_size - 1, -1))
        channels = F.silu(causal_conv(channels, self.held["conv"], None, kept, sequences))
        width = own.num_key_heads * own.key_dim
        q, k, v = channels.split([width, width, own.num_value_heads * own.value_dim], dim=-1)
        q, k = (self._of_value_heads(part) for part in (q, k))
        decay = -self.held["A_log"].exp() * F.softplus(a + self.held["dt_bias"])
        matrices = state[:, kept[0].numel() :].unflatten(1, (own.num_value_heads, own.key_dim, own.value_dim))
        v = v.unflatten(1, (own.num_value_heads, own.value_dim))
        out = self._delta_rule(q * own.key_dim**-0.5, k, v, decay, b.sigmoid(), state=matrices, sequences=sequences)
        out = F.rms_norm(out, out.shape[-1:], None, self._eps).to(z.dtype) * self.held["norm"]
        return (out.float() * F.silu(z.view(out.shape).float())).to(z.dtype).flatten(1)

    def _of_value_heads(self, x: Tensor) -> Tensor:  # [num_tokens, key heads * dim] -> [num_tokens, value heads, dim]
        """Each key head, of length 1, for all its value heads."""
        own = self._own
        x = x.unflatten(1, (own.num_key_heads, own.key_dim))
        x = x * (x.square().sum(dim=-1, keepdim=True) + L2_EPS).rsqrt()
        return x.repeat_interleave(own.num_value_heads // own.num_key_heads, dim=1)

    def _delta_rule(self, *parts: Tensor, state: Tensor, sequences: Sequences) -> Tensor:
        """`parts`: q, k, v, decay and beta of all tokens, [num_tokens, ...]."""
        rows = sequences.rows.long()
        before, is_new = state[rows], sequences.starts <= 0
        if is_new.any():
            before.masked_fill_(is_new[:, None, None, None], 0.0)
        num_decodes = len(rows) - len(sequences.chunk_sizes)
        sizes = [num_decodes, *sequences.chunk_sizes]
        q, k, v, decay, beta = (part.split(sizes) for part in parts)  # those of the decodes, then of each chunk
        out, after = delta_rule.step(q[0], k[0], v[0], decay[0], beta[0], before[:num_decodes])
        state[rows[:num_decodes]] = after
        outs = [out]
        for index, own in enumerate(before[num_decodes:], 1):
            out, after = self._chunks(q[index], k[index], v[index], decay[index], beta[index], own)
            outs.append(out)
            state[rows[num_decodes + index - 1]] = after
        return torch.cat(outs) if sequences.chunk_sizes else out
