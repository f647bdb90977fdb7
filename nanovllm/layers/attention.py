"""Self-attention of one layer: project, attend, project."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, LayerCache, QKNorm
from nanovllm.distributed.group import ALONE, Group
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import make_linear
from nanovllm.layers.residual import Residual


class Attention:
    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,  # None = no norm on queries and keys
        window: int | None,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
        group: Group = ALONE,  # whose ranks have a share of the heads each
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window = window
        self.backend = backend
        self.group = group
        heads = num_heads + 2 * num_kv_heads
        self.qkv_proj = make_linear(
            hidden_size, heads * head_dim, bias=qkv_bias, dtype=dtype, device=device, deterministic=deterministic
        )
        o_bias = o_bias and group.rank == 0
        self.o_proj = make_linear(
            num_heads * head_dim, hidden_size, bias=o_bias, dtype=dtype, device=device, deterministic=deterministic
        )
        self.q_norm = torch.ones(head_dim, dtype=dtype, device=device)
        self.k_norm = torch.ones(head_dim, dtype=dtype, device=device)
        self._qk_norm: QKNorm | None = None
        if qk_norm_eps is not None:
            both = torch.ones(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
            self._qk_norm = QKNorm(self.q_norm, self.k_norm, both, qk_norm_eps)

    def finish_loading(self) -> None:
        self.qkv_proj.finish_loading()
        self.o_proj.finish_loading()
        if self._qk_norm is not None:
            self._qk_norm.both[: self.num_heads] = self.q_norm
            self._qk_norm.both[self.num_heads :] = self.k_norm

    def add_to(
        self, residual: Residual, norm: RMSNorm, cache: LayerCache, step: Any, wanted: Tensor | None = None
    ) -> None:
        """residual += attention(norm(residual)), of which only the `wanted` rows are left, [n] indices."""
        qkv = self.qkv_proj.after_norm(norm, residual).view(len(residual), -1, self.head_dim)
        out = self.backend.forward(qkv, self._qk_norm, cache, step, self.window)
        if wanted is not None:
            residual.keep(wanted)
            out = out[wanted]
        if len(residual):
            residual.add(self.o_proj, out, self.group)
