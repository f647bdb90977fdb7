"""The products around decode attention over latents (MLA) for one to a few tokens, each with the work beside it.

`absorb_and_store` multiplies the queries with up_k and stores the new tokens in the cache; `merge_and_project` merges
the parts of attention and multiplies the result with up_v. Reading up_k and up_v limits the speed: a program begins to
read its part of them before the preceding kernel has ended.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.attention.latent_store import block_of, store_token
from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

MAX_TOKENS = 4  # each reads up_k and up_v by itself
ABSORBED_COLUMNS = 64  # of up_k per program
PROJECTED_ROWS = 16  # of up_v per program
MERGED = 8  # parts that are loaded at a time


def absorb_reference(queries: Tensor, kv_b: Tensor) -> Tensor:
    """[n, heads, query_size] and [heads, plain_size + value_size, latent_size] -> [heads, n, latent_size]

    The first plain_size numbers of a query are multiplied with up_k, the first rows of `kv_b`.
    """
    return torch.bmm(queries.transpose(0, 1).double(), kv_b.double()).to(queries.dtype)


def merge_and_project_reference(
    parts: Tensor,  # [splits, heads, n, latent_size] float32
    sums: Tensor,  # [splits, heads, n]: logarithms, to base 2
    up_v: Tensor,  # [heads, value_size, latent_size]
) -> Tensor:  # [n, heads * value_size]
    weights = (sums.double() * torch.tensor(2.0).log()).softmax(dim=0).unsqueeze(-1)
    merged = (weights * parts).sum(0)  # [heads, n, latent_size]
    return torch.bmm(merged, up_v.double().transpose(1, 2)).transpose(0, 1).flatten(1).to(up_v.dtype)


@triton.jit
def _absorb_kernel(
    queries,  # [n, HEADS, QUERY]
    kv_b,  # [HEADS, PLAIN and value_size, LATENT]
    absorbed,  # [HEADS, n, LATENT]
    new,
    cache,
    norm_weight,
    rows,
    positions,
    blocks,
    cos_sin,
    queries_stride,
    head_stride,  # of kv_b
    new_stride,
    max_blocks,
    eps,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    QUERY: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, t): COLUMNS of a head's absorbed query of token t; the last i stores the token."""
    TILES: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (PLAIN + STEP - 1) // STEP
    token = tl.program_id(1).to(tl.int64)
    head = tl.minimum(tl.program_id(0) // TILES, HEADS - 1)
    col = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    pointers = kv_b + head * head_stride + k[:, None] * LATENT + col[None, :]
    weights = ()  # type: tuple
    for step in tl.static_range(STEPS):
        mask = (step * STEP + k < PLAIN)[:, None] & (col < LATENT)[None, :]
        weights += (tl.load(pointers + step * STEP * LATENT, mask=mask, other=0.0),)
    position = tl.load(positions + token)
    block = block_of(rows, blocks, token, position, max_blocks, BLOCK_SIZE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) < HEADS * TILES:
        query = queries + token * queries_stride + head * QUERY + k
        products = tl.zeros([STEP, COLUMNS], tl.float32)
        for step in tl.static_range(STEPS):
            number = tl.load(query + step * STEP, mask=step * STEP + k < PLAIN, other=0.0).to(tl.float32)
            products += weights[step].to(tl.float32) * number[:, None]
        result = tl.sum(products, 0)
        target = absorbed + (head * tl.num_programs(1) + token) * LATENT + col
        tl.store(target, result.to(absorbed.dtype.element_ty), mask=col < LATENT)
    elif position >= 0:
        store_token(
            new + token * new_stride, cache, block, position, norm_weight, eps, cos_sin,
            LATENT, ROTATED, BLOCK_SIZE, LATENT_PADDED, HALF_PADDED,
        )  # fmt: skip


def absorb_and_store(
    queries: Tensor,  # [n, heads, plain_size + rotated_size]; rows may lie apart
    kv_b: Tensor,  # [heads, plain_size + value_size, latent_size]: of each head up_k, then up_v
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
) -> Tensor:  # [heads, n, latent_size]
    """The absorbed queries. `new` is stored as `latent_store` does."""
    (n, num_heads, query_size), latent_size, rotated_size = queries.shape, kv_b.shape[2], cos_sin.shape[1]
    plain_size = query_size - rotated_size
    assert kv_b.is_contiguous() and queries.stride(1) == query_size and queries.stride(2) == new.stride(1) == 1
    assert cache.is_contiguous() and blocks.stride(1) == 1 and cache.shape[2] == new.shape[1]
    absorbed = torch.empty(num_heads, n, latent_size, dtype=queries.dtype, device=queries.device)
    columns = min(ABSORBED_COLUMNS, next_power_of_2(latent_size))
    launch(
        _absorb_kernel,
        (num_heads * cdiv(latent_size, columns) + 1, n),
        queries,
        kv_b,
        absorbed,
        new,
        cache,
        norm_weight,
        rows,
        positions,
        blocks,
        cos_sin,
        queries.stride(0),
        kv_b.stride(0),
        new.stride(0),
        blocks.stride(0),
        eps,
        HEADS=num_heads,
        PLAIN=plain_size,
        QUERY=query_size,
        LATENT=latent_size,
        ROTATED=rotated_size,
        BLOCK_SIZE=cache.shape[1],
        LATENT_PADDED=next_power_of_2(latent_size),
        HALF_PADDED=next_power_of_2(rotated_size // 2),
        COLUMNS=columns,
        STEP=min(64, next_power_of_2(plain_size)),
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )
    return absorbed


@triton.jit
def _project_kernel(
    parts,  # [SPLITS, HEADS, n, LATENT]
    sums,  # [SPLITS, HEADS, n]
    positions,
    up_v,  # [HEADS, VALUE, LATENT]
    out,  # [n, HEADS * VALUE]
    head_stride,  # of up_v
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, t): ROWS of a head's values of token t, after merging the head's parts."""
    TILES: tl.constexpr = (VALUE + ROWS - 1) // ROWS
    token, num_tokens = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    head = tl.program_id(0) // TILES
    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    col, split = tl.arange(0, LATENT_PADDED), tl.arange(0, SPLITS)
    inside = col < LATENT
    pointers = up_v + head * head_stride + tl.minimum(row, VALUE - 1)[:, None] * LATENT + col[None, :]
    weights = tl.load(pointers, mask=inside[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.load(positions + token) >= 0:
        logs = tl.load(sums + (split * HEADS + head) * num_tokens + token)
        highest = tl.max(logs, 0)
        shares = tl.zeros([MERGED, LATENT_PADDED], tl.float32)
        for first in tl.static_range(0, SPLITS, MERGED):
            part = (first + tl.arange(0, MERGED)) * HEADS + head
            share = tl.exp2(tl.load(sums + part * num_tokens + token) - highest)
            at = (part * num_tokens + token) * LATENT
            values = tl.load(parts + at[:, None] + col[None, :], mask=inside[None, :], other=0.0)
            shares += values * share[:, None]
        merged = tl.sum(shares, 0) / tl.sum(tl.exp2(logs - highest), 0)
        result = tl.sum(weights.to(tl.float32) * merged[None, :], 1)
        target = out + (token * HEADS + head) * VALUE + row
        tl.store(target, result.to(out.dtype.element_ty), mask=row < VALUE)


def merge_and_project(
    parts: Tensor,  # [splits, heads, n, latent_size] float32; a power of two of splits
    sums: Tensor,  # [splits, heads, n] float32: the logarithm of each part's sum, to base 2
    up_v: Tensor,  # [heads, value_size, latent_size], a view of more rows
    *,
    positions: Tensor,  # [n] int32, -1 = padding
    pdl: bool = False,
) -> Tensor:  # [n, heads * value_size]
    """Rows of padding are not written."""
    splits, num_heads, n, latent_size = parts.shape
    value_size = up_v.shape[1]
    assert parts.is_contiguous() and sums.is_contiguous() and up_v.stride(1) == latent_size and up_v.stride(2) == 1
    out = torch.empty(n, num_heads * value_size, dtype=up_v.dtype, device=up_v.device)
    rows = min(PROJECTED_ROWS, next_power_of_2(value_size))
    launch(
        _project_kernel,
        (num_heads * cdiv(value_size, rows), n),
        parts,
        sums,
        positions,
        up_v,
        out,
        up_v.stride(0),
        HEADS=num_heads,
        VALUE=value_size,
        LATENT=latent_size,
        LATENT_PADDED=next_power_of_2(latent_size),
        SPLITS=splits,
        MERGED=min(MERGED, splits),
        ROWS=rows,
        PDL=pdl,
        num_warps=8,
        pdl=pdl,
    )
    return out
