"""Norm and rotate new keys, and store keys and values in the paged cache. prefill.py handles the queries.

One program per token with all its KV heads, so that a token's cosines and sines are loaded once. For an fp8 cache,
each head's key and value are divided by their own scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.attention.fp8 import quantize_reference, scale_of, scaled
from nanovllm.kernels.launch import launch, next_power_of_2


def rope_store_reference(
    qkv: Tensor,  # [num_tokens, heads + 2 * kv_heads, head_dim]
    cache: Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim]
    scales: Tensor | None,  # [2, num_blocks, kv_heads, block_size]
    *,
    rows: Tensor,  # [num_tokens]
    positions: Tensor,  # [num_tokens], -1 = padding
    blocks: Tensor,  # [num_rows, max_blocks]
    k_norm: Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: Tensor,  # [max_position, head_dim]
    num_heads: int,
    num_kv_heads: int,
) -> None:
    block_size = cache.shape[3]
    real = positions >= 0
    row, position = rows[real].long(), positions[real].long()
    _, k, v = qkv[real].split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[position].unsqueeze(1).chunk(2, dim=-1)
    k = norm_rotate_reference(k, k_norm, eps, cos, sin)
    block, slot = blocks[row, position // block_size].long(), position % block_size
    for side, values in enumerate((k, v)):
        if scales is not None:
            values, scale = quantize_reference(values)
            scales[side, block, :, slot] = scale
        cache[side, block, :, slot] = values.to(cache.dtype)


def norm_rotate_reference(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    y = x.float()
    if weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()
    y1, y2 = y.chunk(2, dim=-1)
    return torch.cat([y1 * cos - y2 * sin, y2 * cos + y1 * sin], dim=-1).to(x.dtype)


@triton.jit
def load_halves(base, heads, cols, mask, HEAD_DIM: tl.constexpr):
    pointers = base + heads[:, None] * HEAD_DIM + cols[None, :]
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def norm_rotate(x1, x2, weight, eps, cos, sin, cols, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        inside = cols < HEAD_DIM // 2
        mean = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / HEAD_DIM
        factor = tl.rsqrt(mean + eps)[:, None]
        x1 = x1 * factor * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        x2 = x2 * factor * tl.load(weight + HEAD_DIM // 2 + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


# views into a step's packed buffer have any alignment: compile one kernel for all
@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["rows", "positions"])
def _rope_store_kernel(
    qkv,
    cache,
    scales,
    rows,
    positions,
    blocks,
    k_norm,
    cos_sin,
    eps,
    max_blocks,
    num_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    scale_offset = num_blocks.to(tl.int64) * (KV_HEADS * BLOCK_SIZE)  # from a key's slot to its value's
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, HALF_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    kv_heads = tl.arange(0, KV_HEADS_PADDED)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    position = tl.load(positions + token)
    row = tl.load(rows + token).to(tl.int64)
    real = position >= 0
    inside = cols < HALF
    # all heads of a padding token are masked
    kv_mask = kv_heads < tl.where(real, KV_HEADS, 0)
    k_mask = kv_mask[:, None] & inside[None, :]
    v_mask = kv_mask[:, None] & (dims < HEAD_DIM)[None, :]
    position = tl.maximum(position, 0)

    k_base = qkv + (token * (HEADS + 2 * KV_HEADS) + HEADS) * HEAD_DIM
    v_base = k_base + KV_HEADS * HEAD_DIM
    k1, k2 = load_halves(k_base, kv_heads, cols, k_mask, HEAD_DIM)
    v = tl.load(v_base + kv_heads[:, None] * HEAD_DIM + dims[None, :], mask=v_mask, other=0.0)
    cos_base = cos_sin + position.to(tl.int64) * HEAD_DIM + cols
    cos = tl.load(cos_base, mask=inside, other=0.0)[None, :]
    sin = tl.load(cos_base + HALF, mask=inside, other=0.0)[None, :]
    block = tl.load(blocks + row * max_blocks + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)

    k1, k2 = norm_rotate(k1, k2, k_norm, eps, cos, sin, cols, HEAD_DIM, NORM)
    slots = (block * KV_HEADS + kv_heads) * BLOCK_SIZE + position % BLOCK_SIZE  # [kv_heads]
    if FP8:
        k1 = k1.to(qkv.dtype.element_ty).to(tl.float32)  # round as a cache of the activations' type would
        k2 = k2.to(qkv.dtype.element_ty).to(tl.float32)
        k_scale = scale_of(tl.maximum(tl.max(tl.abs(k1), 1), tl.max(tl.abs(k2), 1)), INTERPRETED)
        k1 = scaled(k1, k_scale[:, None], INTERPRETED)
        k2 = scaled(k2, k_scale[:, None], INTERPRETED)
        v = v.to(tl.float32)
        v_scale = scale_of(tl.max(tl.abs(v), 1), INTERPRETED)
        v = scaled(v, v_scale[:, None], INTERPRETED)
        tl.store(scales + slots, k_scale, mask=kv_mask)
        tl.store(scales + scale_offset + slots, v_scale, mask=kv_mask)
    k_out = cache + slots[:, None] * HEAD_DIM + cols[None, :]
    tl.store(k_out, k1.to(cache.dtype.element_ty), mask=k_mask)
    tl.store(k_out + HALF, k2.to(cache.dtype.element_ty), mask=k_mask)
    v_out = cache + scale_offset * HEAD_DIM + slots[:, None] * HEAD_DIM + dims[None, :]
    tl.store(v_out, v.to(cache.dtype.element_ty), mask=v_mask)


def rope_store(
    qkv: Tensor,  # [num_tokens, heads + 2 * kv_heads, head_dim]
    cache: Tensor,  # [2, num_blocks, kv_heads, block_size, head_dim]
    scales: Tensor | None,  # [2, num_blocks, kv_heads, block_size], of an fp8 cache
    *,
    rows: Tensor,  # [num_tokens], rows of `blocks`
    positions: Tensor,  # [num_tokens], -1 = padding
    blocks: Tensor,  # [num_rows, max_blocks]
    k_norm: Tensor | None,  # [head_dim]
    eps: float,
    cos_sin: Tensor,  # [max_position, head_dim] float32
    num_heads: int,
    num_kv_heads: int,
    pdl: bool = False,
) -> None:
    num_tokens, _, head_dim = qkv.shape
    assert qkv.is_contiguous() and cache.is_contiguous() and blocks.stride(1) == 1
    assert (scales is not None) == (cache.dtype == torch.float8_e4m3fn)
    launch(
        _rope_store_kernel,
        (num_tokens,),
        qkv,
        cache,
        cache if scales is None else scales,
        rows,
        positions,
        blocks,
        cos_sin if k_norm is None else k_norm,
        cos_sin,
        eps,
        blocks.stride(0),
        cache.shape[1],
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.shape[3],
        KV_HEADS_PADDED=next_power_of_2(num_kv_heads),
        HALF_PADDED=next_power_of_2(head_dim // 2),
        DIM_PADDED=next_power_of_2(head_dim),
        NORM=k_norm is not None,
        FP8=scales is not None,
        INTERPRETED=not isinstance(_rope_store_kernel, triton.JITFunction),
        PDL=pdl,
        num_warps=_num_warps(num_kv_heads, head_dim),
        enable_fp_fusion=False,  # round as the reference does
        pdl=pdl,
    )


def _num_warps(num_kv_heads: int, head_dim: int) -> int:
    """Enough warps that a thread holds about 32 elements of the keys."""
    elements = next_power_of_2(num_kv_heads) * next_power_of_2(head_dim)
    return min(max(elements // 1024, 1), 16)
