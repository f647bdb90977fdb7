"""The experts of one to a few tokens: every (token, choice) pair reads its expert's weights by itself.

Reading the weights limits the speed, so tensor cores would not help.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch
from nanovllm.kernels.linear.one_row import columns_of
from nanovllm.kernels.moe.activation import gated
from nanovllm.kernels.moe.tiles import Tile
from nanovllm.kernels.moe.weights import ExpertWeights


@triton.jit
def _gate_up_row_kernel(
    x_ptr,  # [T, SIZE_K]
    weight_ptr,  # [NUM_EXPERTS, 2 * SIZE_N, SIZE_K]
    scale_ptr,  # [NUM_EXPERTS, 2 * SIZE_N], or None
    bias_ptr,  # [NUM_EXPERTS, 2 * SIZE_N], or None
    experts_ptr,  # [T * TOP_K]
    hidden_ptr,  # [T * TOP_K, SIZE_N]
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden = activation(gate(x), up(x)): one program per pair and BLOCK_N columns of hidden."""
    tiles: tl.constexpr = (SIZE_N + BLOCK_N - 1) // BLOCK_N
    pair = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    rows = tl.minimum(n, SIZE_N - 1)[:, None] * SIZE_K
    gate_ptrs = weight_ptr + expert * (2 * SIZE_N * SIZE_K) + rows + k[None, :]
    up_ptrs = gate_ptrs + SIZE_N * SIZE_K
    # x is loaded in the shape of the weight tile: each thread loads what it multiplies, and no barrier is needed
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64) * SIZE_K + (n * 0)[:, None] + k[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in tl.range(0, SIZE_K, BLOCK_K, loop_unroll_factor=4):
        inside = (k < SIZE_K - begin)[None, :]
        x = tl.load(x_ptrs + begin, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(gate_ptrs + begin, mask=inside, other=0.0).to(tl.float32) * x
        up += tl.load(up_ptrs + begin, mask=inside, other=0.0).to(tl.float32) * x
    if scale_ptr is not None:
        scale_ptrs = scale_ptr + expert * (2 * SIZE_N) + tl.minimum(n, SIZE_N - 1)
        gate *= tl.load(scale_ptrs)[:, None]
        up *= tl.load(scale_ptrs + SIZE_N)[:, None]
    gate_sum = tl.sum(gate, 1)
    up_sum = tl.sum(up, 1)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * (2 * SIZE_N) + tl.minimum(n, SIZE_N - 1)
        gate_sum += tl.load(bias_ptrs).to(tl.float32)
        up_sum += tl.load(bias_ptrs + SIZE_N).to(tl.float32)
    hidden = gated(gate_sum, up_sum, ALPHA, LIMIT, GELU)
    tl.store(hidden_ptr + pair * SIZE_N + n, hidden.to(hidden_ptr.dtype.element_ty), mask=n < SIZE_N)


@triton.jit
def _down_row_kernel(
    hidden_ptr,  # [T * TOP_K, SIZE_K]
    weight_ptr,  # [NUM_EXPERTS, SIZE_N, SIZE_K]
    scale_ptr,  # [NUM_EXPERTS, SIZE_N], or None
    bias_ptr,  # [NUM_EXPERTS, SIZE_N], or None
    experts_ptr,  # [T * TOP_K]
    routing_ptr,  # [T * TOP_K], the routing weights
    residual_ptr,  # [T, SIZE_N]
    shared_hidden_ptr,  # [T, SHARED_K]
    shared_weight_ptr,  # [SIZE_N, SHARED_K]
    out_ptr,  # [T, SIZE_N]
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    SHARED_K: tl.constexpr,  # 0: there is no shared expert
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = residual + sum over choices of routing weight * down(hidden), + down(hidden) of the shared expert.

    One program per token and BLOCK_N columns.
    """
    tiles: tl.constexpr = (SIZE_N + BLOCK_N - 1) // BLOCK_N
    token = (tl.program_id(0) // tiles).to(tl.int64)
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = tl.minimum(n, SIZE_N - 1)[:, None] * SIZE_K
    shared = ()  # type: tuple
    for begin in tl.static_range(0, SHARED_K, BLOCK_K):  # which needs no chosen expert, before waiting for these
        shared_ptrs = shared_weight_ptr + tl.minimum(n, SIZE_N - 1)[:, None] * SHARED_K + k[None, :]
        shared += (columns_of(shared_ptrs, k[None, :], begin, SHARED_K, BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in tl.static_range(0, SHARED_K, BLOCK_K):
        row_ptrs = shared_hidden_ptr + token * SHARED_K + (n * 0)[:, None] + k[None, :]
        row = columns_of(row_ptrs, k[None, :], begin, SHARED_K, BLOCK_K)
        acc += shared[begin // BLOCK_K].to(tl.float32) * row.to(tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        chosen = (expert >= 0) & (expert < NUM_EXPERTS)
        end = tl.where(chosen, SIZE_K, 0)
        scale = tl.load(routing_ptr + pair).to(tl.float32)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + tl.where(chosen, expert, 0) * SIZE_N + tl.minimum(n, SIZE_N - 1)
            biases += tl.where(chosen, scale, 0.0) * tl.load(bias_ptrs).to(tl.float32)
        if scale_ptr is not None:
            scale_ptrs = scale_ptr + tl.where(chosen, expert, 0) * SIZE_N + tl.minimum(n, SIZE_N - 1)
            scale = (scale * tl.load(scale_ptrs))[:, None]
        hidden_ptrs = hidden_ptr + pair * SIZE_K + (n * 0)[:, None] + k[None, :]
        weight_ptrs = weight_ptr + expert * (SIZE_N * SIZE_K) + rows + k[None, :]
        for begin in tl.range(0, SIZE_K, BLOCK_K, loop_unroll_factor=4):
            inside = (k < end - begin)[None, :]
            hidden = tl.load(hidden_ptrs + begin, mask=inside, other=0.0).to(tl.float32) * scale
            acc += tl.load(weight_ptrs + begin, mask=inside, other=0.0).to(tl.float32) * hidden
    result = tl.sum(acc, 1)
    if bias_ptr is not None:
        result += biases
    offsets = token * SIZE_N + n
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + offsets, mask=n < SIZE_N, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=n < SIZE_N)


def rows_forward(
    x: Tensor,
    layer: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    residual: Tensor | None,
    gate_up_tile: Tile,
    down_tile: Tile,
    *,
    shared: tuple[Tensor, Tensor] | None = None,  # of a shared expert: [T, S], silu(gate) * up; [H, S], its down
    pdl: bool,
) -> Tensor:
    """Two launches. Arguments as for `experts_forward`; returns `out`."""
    (num_tokens, hidden_size), (num_experts, _, size) = x.shape, layer.down.shape
    top_k = experts.shape[1]
    hidden = torch.empty(num_tokens * top_k, size, dtype=x.dtype, device=x.device)
    options: dict[str, Any] = {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "PDL": pdl, "pdl": pdl}
    tile = gate_up_tile
    launch(
        _gate_up_row_kernel,
        (num_tokens * top_k * cdiv(size, tile.block_n),),
        x,
        layer.gate_up,
        layer.gate_up_scale,
        layer.gate_up_bias,
        experts,
        hidden,
        SIZE_N=size,
        SIZE_K=hidden_size,
        ALPHA=layer.alpha,
        LIMIT=layer.limit,
        GELU=layer.gelu,
        **tile.options,
        **options,
    )
    tile = down_tile
    launch(
        _down_row_kernel,
        (num_tokens * cdiv(hidden_size, tile.block_n),),
        hidden,
        layer.down,
        layer.down_scale,
        layer.down_bias,
        experts,
        weights,
        residual,
        *(shared or (None, None)),
        out,
        SIZE_N=hidden_size,
        SIZE_K=size,
        SHARED_K=0 if shared is None else shared[0].shape[1],
        HAS_RESIDUAL=residual is not None,
        **tile.options,
        **options,
    )
    return out
