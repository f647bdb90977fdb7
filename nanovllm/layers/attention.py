"""Self-attention of one layer: project, norm, rotate, attend, project."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.layers.linear import Linear
from nanovllm.layers.rotary_embedding import rotate


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
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window = window
        self.backend = backend
        heads = num_heads + 2 * num_kv_heads
        self.qkv_proj = Linear(hidden_size, heads * head_dim, bias=qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=o_bias, dtype=dtype, device=device)
        self.qk_norm_eps = qk_norm_eps
        self.q_norm = torch.ones(head_dim, dtype=dtype, device=device)
        self.k_norm = torch.ones(head_dim, dtype=dtype, device=device)
        self._qk_norm = torch.empty(0)  # [heads + kv_heads, head_dim]: the two side by side, for one pass over both

    def finish_loading(self) -> None:
        self.qkv_proj.finish_loading()
        self.o_proj.finish_loading()
        q_norm, k_norm = self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1)
        self._qk_norm = torch.cat([q_norm, k_norm])

    def add_to(self, residual: Tensor, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: Tensor, step: Any) -> Tensor:
        """residual + attention(x), all [num_tokens, hidden]."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        if self.qk_norm_eps is not None:
            qkv = self._norm_qk(qkv, self.qk_norm_eps)
        out = self.backend.forward(rotate(qkv, cos_sin), cache, step, self.window)
        return self.o_proj.add_to(residual, out)

    def _norm_qk(self, qkv: Tensor, eps: float) -> Tensor:
        num_normed = self.num_heads + self.num_kv_heads
        normed = F.rms_norm(qkv[:, :num_normed], (self.head_dim,), None, eps) * self._qk_norm
        return torch.cat([normed, qkv[:, num_normed:]], dim=1)
