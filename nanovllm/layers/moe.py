"""A mixture of experts: each token passes the few experts its router picks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.distributed.group import ALONE, Group
from nanovllm.kernels.launch import dependent_launch, usable
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import make_linear
from nanovllm.layers.residual import Residual


class MoE:
    """Tokens are sorted by expert, so that each expert used runs once over all its tokens.

    On a GPU kernels do the same without asking the host how many tokens an expert has.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_token: int,
        norm_topk_prob: bool,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
        group: Group = ALONE,  # whose ranks have a share of every expert's columns each
    ) -> None:
        self.group = group
        self.num_experts_per_token = num_experts_per_token
        self.norm_topk_prob = norm_topk_prob
        self.gate = make_linear(
            hidden_size, num_experts, bias=False, dtype=dtype, device=device, deterministic=deterministic
        )
        self.gate_up = torch.empty(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(num_experts, hidden_size, intermediate_size, dtype=dtype, device=device)
        self._kernels: Callable[..., Tensor] | None = None
        self._choose: Callable[..., tuple[Tensor, Tensor]] = choose_experts
        if usable(device.type):
            from nanovllm.kernels.moe.experts import experts_forward
            from nanovllm.kernels.moe.route import route

            self._kernels = partial(experts_forward, deterministic=deterministic, pdl=dependent_launch())
            self._choose = partial(route, pdl=dependent_launch())

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, hidden]
        weights, experts = self._route(x)
        if self._kernels is not None:
            return self._kernels(x, self.gate_up, self.down, weights, experts)
        order = experts.reshape(-1).argsort(stable=True)
        tokens = order // self.num_experts_per_token  # which token each sorted entry belongs to
        counts = torch.bincount(experts.reshape(-1), minlength=self.gate_up.shape[0]).tolist()
        sorted_x = x[tokens]
        sorted_y = torch.empty_like(sorted_x)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(begin, begin + count)
                sorted_y[rows] = F.linear(
                    silu_and_mul(F.linear(sorted_x[rows], self.gate_up[expert])), self.down[expert]
                )
                begin += count
        sorted_y *= weights.reshape(-1)[order, None]
        # back to [token, choice] order before summing: the order of addition must not depend on the batch
        unsorted = torch.empty_like(sorted_y)
        unsorted[order] = sorted_y
        return unsorted.view(x.shape[0], self.num_experts_per_token, -1).sum(dim=1)

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        """residual += moe(norm(residual))"""
        x = residual.normed(norm)
        rows = residual.rows if self.group.rank == 0 else None  # one rank's sum carries them
        if self._kernels is not None:
            weights, experts = self._route(x)
            y = self._kernels(x, self.gate_up, self.down, weights, experts, residual=rows)
        else:
            y = self(x) if rows is None else rows + self(x)
        residual.rows = self.group.all_reduce(y)

    def finish_loading(self) -> None:
        self.gate.finish_loading()

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:  # two of [num_tokens, experts per token]
        return self._choose(self.gate(x), self.num_experts_per_token, normalize=self.norm_topk_prob)


def choose_experts(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """What `kernels/route.py` does in one launch: [num_tokens, experts] to weights and experts, [num_tokens, top_k]."""
    weights, experts = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts
