"""A mixture of experts in a fixed number of launches whose grids do not depend on the router's choices.

The host never needs to know how many tokens an expert has, so the launches can be captured in a CUDA graph. A pair is a
token and one of its chosen experts, numbered token * k + choice. For a few tokens every pair reads its expert's weights
(rows.py); for more, pairs are grouped by expert first (grouped.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.moe.grouped import grouped_forward
from nanovllm.kernels.moe.rows import rows_forward
from nanovllm.kernels.moe.tiles import choose_tiles, row_tiles
from nanovllm.kernels.moe.weights import ExpertWeights, PackedExperts

ROW_TOKENS = 4  # up to this many tokens few pairs have the same expert, and grouping costs more than it saves


def experts_forward(
    x: Tensor,  # [T, H]
    gate_up: Tensor | PackedWords,  # [E, 2 * I, H], of x's type, int8 or packed; the gate rows, then the up rows
    down: Tensor | PackedWords,  # [E, H, I], as gate_up
    weights: Tensor,  # [T, k], of x's type
    experts: Tensor,  # [T, k]; a choice outside 0..E-1 is skipped
    *,
    gate_up_scale: Tensor | None = None,  # [E, 2 * I] float32, of an int8 weight
    down_scale: Tensor | None = None,  # [E, H] float32, of an int8 weight
    gate_up_bias: Tensor | None = None,  # [E, 2 * I], of x's type
    down_bias: Tensor | None = None,  # [E, H], of x's type
    alpha: float = 1.0,  # and limit: of the clamped activation
    limit: float = 0.0,  # 0 = silu(gate) * up
    gelu: bool = False,  # gelu(gate) * up, in its approximation with tanh
    out: Tensor | None = None,  # [T, H]
    residual: Tensor | None = None,  # [T, H], added to the result; updated in place unless `out` is given
    shared: tuple[Tensor, Tensor] | None = None,  # of a shared expert, up to ROW_TOKENS: [T, S], silu(gate) * up; down
    in_parts: bool = False,  # if all choices are experts, may return [k, T, H], which the caller adds to the residual
    deterministic: bool = False,  # a token's bits do not depend on the rest of the batch
    pdl: bool = False,
) -> Tensor:
    """For each token the sum over its choices of routing weight * down(activation(gate(x), up(x)))."""
    if out is None:
        out = torch.empty_like(x) if residual is None else residual
    if x.shape[0] == 0:
        return out
    if isinstance(gate_up, PackedWords) or isinstance(down, PackedWords):
        from nanovllm.kernels.moe.packed import packed_experts_forward

        assert isinstance(gate_up, PackedWords) and isinstance(down, PackedWords) and shared is None
        packed = PackedExperts(gate_up, down, gate_up_bias, down_bias, alpha, limit, gelu)
        return packed_experts_forward(
            x, packed, weights, experts, out, residual, in_parts=in_parts, deterministic=deterministic, pdl=pdl
        )
    assert all(t.is_contiguous() for t in (x, gate_up, down, weights, experts, out))
    optional = (residual, gate_up_scale, down_scale, gate_up_bias, down_bias, *(shared or ()))
    assert all(t is None or t.is_contiguous() for t in optional)
    for weight, scale in ((gate_up, gate_up_scale), (down, down_scale)):
        assert weight.dtype == (x.dtype if scale is None else torch.int8)
    layer = ExpertWeights(gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias, alpha, limit, gelu)
    if x.shape[0] <= ROW_TOKENS and not deterministic:
        row_tile = row_tiles(x.dtype, shared=shared is not None)
        return rows_forward(x, layer, weights, experts, out, residual, *row_tile, shared=shared, pdl=pdl)
    assert shared is None
    tiles = choose_tiles(experts.numel() / gate_up.shape[0], x.dtype, deterministic=deterministic)
    return grouped_forward(x, layer, weights, experts, out, residual, tiles, pdl=pdl)


def experts_forward_reference(
    x: Tensor,  # [T, H]
    gate_up: Tensor,  # [E, 2 * I, H]
    down: Tensor,  # [E, H, I]
    weights: Tensor,  # [T, k]
    experts: Tensor,  # [T, k]
    *,
    gate_up_scale: Tensor | None = None,  # [E, 2 * I]
    down_scale: Tensor | None = None,  # [E, H]
    gate_up_bias: Tensor | None = None,  # [E, 2 * I]
    down_bias: Tensor | None = None,  # [E, H]
    alpha: float = 1.0,
    limit: float = 0.0,
    gelu: bool = False,
    residual: Tensor | None = None,  # [T, H]
) -> Tensor:
    """One token and one expert at a time, in float64."""
    gate_up, down = gate_up.double(), down.double()
    if gate_up_scale is not None:
        gate_up = gate_up * gate_up_scale[:, :, None]
    if down_scale is not None:
        down = down * down_scale[:, :, None]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if residual is None else residual.double()
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            if 0 <= expert < gate_up.shape[0]:
                both = gate_up[expert] @ row + (0 if gate_up_bias is None else gate_up_bias[expert])
                gate, up = both.chunk(2)
                if limit:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
                hidden = (F.gelu(gate, approximate="tanh") if gelu else gate * torch.sigmoid(alpha * gate)) * up
                out[token] += weight * (down[expert] @ hidden + (0 if down_bias is None else down_bias[expert]))
    return out.to(x.dtype)
