"""How the work of a batch of decodes is cut, for decode_attention.py.

The tokens of each (sequence, kv head) are cut into equal tiles; runs of them, segments, are given to programs in one of
two ways. Fixed splits: every (sequence, kv head) has as many programs, with one segment each; a program knows its work
without a search. Stream-K: a fixed number of programs takes equal shares of all tiles, whatever the lengths, each
walking its share as segments, which it finds in the running number of tiles that `plan_decode` writes once a step.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch, next_power_of_2

MANY_PAIRS = 11  # of (sequence, kv head), a multiprocessor


@dataclass(frozen=True)
class DecodeConfig:
    """How a batch is cut: tokens a tile, programs in the grid, warps a program, depth of the load pipeline.

    `splits` > 0 gives every (sequence, kv head) that many programs, `num_programs` in all, and needs no plan; 0 shares
    all tiles among `num_programs`, which should be resident at once.
    """

    tile: int
    num_programs: int
    num_warps: int
    num_stages: int
    splits: int = 0


def decode_config(
    batch: int, *, kv_heads: int, head_dim: int, cache_dtype: torch.dtype, num_sms: int, stream_k: bool
) -> DecodeConfig:
    """What measured best on an H200. `stream_k`: lengths are so unequal that sequences must share programs."""
    row_bytes = next_power_of_2(head_dim) * cache_dtype.itemsize
    if stream_k and cache_dtype == torch.float32:
        return DecodeConfig(tile=16, num_programs=2 * num_sms, num_warps=4, num_stages=2)
    if stream_k:
        tile = max(16, min(128, 16384 // row_bytes))
        return DecodeConfig(tile=tile, num_programs=2 * num_sms, num_warps=4, num_stages=3)
    pairs = batch * kv_heads
    # Lengths differ: where pairs are few, one program each would leave most of the chip waiting for the longest.
    splits = max(1, min(2 * num_sms // pairs, 16), min(5 * num_sms // pairs, 4))  # more are slow to merge
    if cache_dtype == torch.float32:
        return DecodeConfig(tile=16, num_programs=pairs * splits, num_warps=4, num_stages=3, splits=splits)
    # Small programs, many of them on a multiprocessor: one's start and end run beside the stream of another.
    tile = max(16, min(64, 8192 // row_bytes))
    if cache_dtype.itemsize == 1 and pairs >= MANY_PAIRS * num_sms:
        tile //= 2  # more of them still: unpacking takes its time
    return DecodeConfig(tile=tile, num_programs=pairs * splits, num_warps=2, num_stages=3, splits=splits)


def plan_decode_reference(positions: torch.Tensor, *, tile: int, window: int | None) -> torch.Tensor:
    first = (positions - window + 1).clamp(min=0) if window is not None else torch.zeros_like(positions)
    tiles = torch.where(positions < 0, 0, positions // tile - first // tile + 1)
    return torch.cat([tiles.new_zeros(1), tiles.cumsum(0)]).to(torch.int32)  # [batch + 1]


@triton.jit
def tile_span(position, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """First position seen, and the number of tiles from the one that holds it to the one that holds `position`."""
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0
    return first, position // TILE - first // TILE + 1


@triton.jit(do_not_specialize=["batch"])
def _plan_kernel(
    positions, prefix, batch, TILE: tl.constexpr, WINDOW: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, COLS)
    position = tl.load(positions + i, mask=i < batch, other=-1)
    _, tiles = tile_span(position, TILE, WINDOW)
    tiles = tl.where(position < 0, 0, tiles)
    tl.store(prefix + 1 + i, tl.cumsum(tiles, 0), mask=i < batch)
    tl.store(prefix, 0)


def plan_decode(positions: torch.Tensor, prefix: torch.Tensor, *, tile: int, window: int | None, pdl: bool) -> None:
    """Writes the running number of tiles into `prefix [batch + 1]`; once a step and window serves every layer."""
    batch = positions.shape[0]
    assert prefix.shape == (batch + 1,) and prefix.dtype == torch.int32
    launch(
        _plan_kernel,
        (1,),
        positions,
        prefix,
        batch,
        TILE=tile,
        WINDOW=window or 0,
        COLS=padded_batch(batch),
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )


def padded_batch(batch: int) -> int:
    """The batch size kernels are compiled for: three classes, so that buckets share a compilation."""
    return next((size for size in (32, 256, 1024) if batch <= size), next_power_of_2(batch))


@triton.jit
def first_unit(program, share, rest):
    """Where a program's share begins: the first `rest` programs take one unit more than `share`."""
    return program * share + tl.minimum(program, rest)


@triton.jit
def program_of(unit, share, rest):
    large = rest * (share + 1)
    return tl.where(unit < large, unit // (share + 1), rest + (unit - large) // tl.maximum(share, 1))


@triton.jit
def sequence_of(ends, unit):
    """The sequence a unit belongs to, and its first unit; `ends` is where each sequence's units end."""
    before = ends <= unit
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)
