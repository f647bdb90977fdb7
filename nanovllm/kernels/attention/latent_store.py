"""Stores new tokens in a paged cache of latents (MLA): normalizes each token's latent and rotates its key."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.attention.rope_store import norm_rotate_reference
from nanovllm.kernels.elementwise.rms_norm import rms_norm_reference
from nanovllm.kernels.launch import launch, next_power_of_2


def latent_store_reference(
    new: Tensor,  # [n, latent_size + rotated_size]
    cache: Tensor,  # [num_blocks, block_size, latent_size + rotated_size]
    norm_weight: Tensor,  # [latent_size]
    eps: float,
    *,
    rows: Tensor,  # [n]
    positions: Tensor,  # [n], -1 = padding
    blocks: Tensor,  # [num_rows, max_blocks]
    cos_sin: Tensor,  # [max_position, rotated_size]
) -> None:
    block_size, rotated_size = cache.shape[1], cos_sin.shape[1]
    real = positions >= 0
    row, position = rows[real].long(), positions[real].long()
    latent, key = new[real].split([new.shape[1] - rotated_size, rotated_size], dim=-1)
    latent = rms_norm_reference(latent, norm_weight, eps)
    key = norm_rotate_reference(key, None, 0.0, *cos_sin[position].chunk(2, dim=-1))
    block = blocks[row, position // block_size].long()
    cache[block, position % block_size] = torch.cat([latent, key], dim=-1).to(cache.dtype)


@triton.jit
def block_of(rows, blocks, token, position, max_blocks, BLOCK_SIZE: tl.constexpr):
    """The block of the cache for a token; of padding, any."""
    table = blocks + tl.load(rows + token).to(tl.int64) * max_blocks
    return tl.load(table + tl.maximum(position, 0) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def store_token(
    source,  # of this token
    cache,
    block,  # of the cache, in which it is stored
    position,
    norm_weight,
    eps,
    cos_sin,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    HALF: tl.constexpr = ROTATED // 2
    ITEM: tl.constexpr = cache.dtype.element_ty
    target = cache + (block * BLOCK_SIZE + position % BLOCK_SIZE) * (LATENT + ROTATED)
    col, half = tl.arange(0, LATENT_PADDED), tl.arange(0, HALF_PADDED)
    col_inside, inside = col < LATENT, half < HALF
    latent = tl.load(source + col, mask=col_inside, other=0.0).to(tl.float32)
    gain = tl.load(norm_weight + col, mask=col_inside, other=0.0).to(tl.float32)
    first = tl.load(source + LATENT + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + LATENT + HALF + half, mask=inside, other=0.0).to(tl.float32)
    angles = cos_sin + position.to(tl.int64) * ROTATED + half
    cos, sin = tl.load(angles, mask=inside, other=0.0), tl.load(angles + HALF, mask=inside, other=0.0)
    latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * gain
    tl.store(target + col, latent.to(ITEM), mask=col_inside)
    tl.store(target + LATENT + half, (first * cos - second * sin).to(ITEM), mask=inside)
    tl.store(target + LATENT + HALF + half, (second * cos + first * sin).to(ITEM), mask=inside)


@triton.jit
def _latent_store_kernel(
    new,
    cache,
    norm_weight,
    rows,
    positions,
    blocks,
    cos_sin,
    new_stride,
    max_blocks,
    eps,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    block = block_of(rows, blocks, token, position, max_blocks, BLOCK_SIZE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if position >= 0:
        store_token(
            new + token * new_stride, cache, block, position, norm_weight, eps, cos_sin,
            LATENT, ROTATED, BLOCK_SIZE, LATENT_PADDED, HALF_PADDED,
        )  # fmt: skip


def latent_store(
    new: Tensor,  # [n, latent_size + rotated_size], before the norm; rows may lie apart
    cache: Tensor,  # [num_blocks, block_size, latent_size + rotated_size]
    norm_weight: Tensor,  # [latent_size]
    eps: float,
    *,
    rows: Tensor,  # [n] int32
    positions: Tensor,  # [n] int32, -1 = padding
    blocks: Tensor,  # [num_rows, max_blocks] int32
    cos_sin: Tensor,  # [max_position, rotated_size] float32
    pdl: bool = False,
) -> None:
    """See the reference."""
    n, size = new.shape
    rotated_size = cos_sin.shape[1]
    assert new.stride(1) == 1 and cache.is_contiguous() and blocks.stride(1) == 1 and cache.shape[2] == size
    launch(
        _latent_store_kernel,
        (n,),
        new,
        cache,
        norm_weight,
        rows,
        positions,
        blocks,
        cos_sin,
        new.stride(0),
        blocks.stride(0),
        eps,
        LATENT=size - rotated_size,
        ROTATED=rotated_size,
        BLOCK_SIZE=cache.shape[1],
        LATENT_PADDED=next_power_of_2(size - rotated_size),
        HALF_PADDED=next_power_of_2(rotated_size // 2),
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
