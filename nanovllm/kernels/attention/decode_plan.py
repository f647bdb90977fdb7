"""How the work of a batch of decodes is divided among programs, for decode.py.

The tokens of each (sequence, KV head) are divided into tiles of equal size. Runs of tiles, called segments, are
assigned to programs in one of two ways. Fixed splits: every (sequence, KV head) has the same number of programs with
one segment each, and a program computes its segment from its index. Stream-K: a fixed number of programs takes equal
numbers of tiles, whatever the sequences' lengths; each finds its segments in a prefix sum of tiles that `plan_decode`
writes once per step.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch, next_power_of_2

# Programs that an SM holds at once, as their registers allow, of large and of half as large tiles of an 8-bit cache.
# Unpacking takes so long that a few programs, which run when the others have ended, do not read at full speed.
LARGE, SMALL = 6, 10
# And of programs with four warps and tiles twice as large, which are faster where all run at once. From MANY programs
# per SM on small tiles are faster, whatever the waves.
WIDE, MANY = 3, 12


@dataclass(frozen=True)
class DecodeConfig:
    tile: int  # tokens per tile
    num_programs: int  # in the grid
    num_warps: int
    num_stages: int  # of the pipelined loads
    splits: int = 0  # programs per (sequence, KV head); 0: stream-K, with all programs resident at once


def decode_config(
    batch: int, *, kv_heads: int, head_dim: int, cache_dtype: torch.dtype, num_sms: int, stream_k: bool
) -> DecodeConfig:
    """The configuration that measured fastest on an H200. `stream_k` is for very unequal lengths."""
    row_bytes = next_power_of_2(head_dim) * cache_dtype.itemsize
    if stream_k and cache_dtype == torch.float32:
        return DecodeConfig(tile=16, num_programs=2 * num_sms, num_warps=4, num_stages=2)
    if stream_k:
        tile = max(16, min(128, 16384 // row_bytes))
        return DecodeConfig(tile=tile, num_programs=2 * num_sms, num_warps=4, num_stages=3)
    pairs, quantized = batch * kv_heads, cache_dtype.itemsize == 1
    # Lengths differ: with few pairs and one program each, most SMs would wait for the longest sequence.
    held = 4 if quantized else 5  # programs per SM up to which pairs are split; merging more takes too long
    splits = max(1, min(2 * num_sms // pairs, 16), min(held * num_sms // pairs, 4))
    if cache_dtype == torch.float32:
        return DecodeConfig(tile=16, num_programs=pairs * splits, num_warps=4, num_stages=3, splits=splits)
    # Small programs, many per SM: the start and end of one overlap with the loads of others.
    tile = max(16, min(64, 8192 // row_bytes))
    if quantized and splits == 1 and pairs <= WIDE * num_sms:
        return DecodeConfig(tile=2 * tile, num_programs=pairs, num_warps=4, num_stages=3, splits=1)
    many = quantized and pairs >= MANY * num_sms
    if many or quantized and _fullness(pairs, LARGE * num_sms) < _fullness(pairs, SMALL * num_sms):
        tile = max(16, tile // 2)
    stages = 4 if many else 3
    return DecodeConfig(tile=tile, num_programs=pairs * splits, num_warps=2, num_stages=stages, splits=splits)


def _fullness(programs: int, held: int) -> float:
    """The part of the places for programs that is taken on average, if they run in waves; 1 for a single wave."""
    return programs / (held * -(-programs // held)) if programs > held else 1.0


def plan_decode_reference(positions: torch.Tensor, *, tile: int, window: int | None) -> torch.Tensor:
    first = (positions - window + 1).clamp(min=0) if window is not None else torch.zeros_like(positions)
    tiles = torch.where(positions < 0, 0, positions // tile - first // tile + 1)
    return torch.cat([tiles.new_zeros(1), tiles.cumsum(0)]).to(torch.int32)  # [batch + 1]


@triton.jit
def tile_span(position, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first visible position, and the number of tiles from its tile to that of `position`."""
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
    """Write the prefix sum of tiles per sequence into `prefix` [batch + 1]. Once per step and window."""
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
    """The batch size that kernels are compiled for: few classes, so that graph buckets share a compiled kernel."""
    return next((size for size in (32, 256, 1024) if batch <= size), next_power_of_2(batch))


@triton.jit
def first_unit(program, units_per_program, rest):
    """The first unit (tile of one KV head) of a program. The first `rest` programs take one unit more than the rest."""
    return program * units_per_program + tl.minimum(program, rest)


@triton.jit
def program_of(unit, units_per_program, rest):
    """The program that takes a unit; the inverse of `first_unit`."""
    large = rest * (units_per_program + 1)
    return tl.where(
        unit < large, unit // (units_per_program + 1), rest + (unit - large) // tl.maximum(units_per_program, 1)
    )


@triton.jit
def sequence_of(ends, unit):
    """The sequence that a unit belongs to, and its first unit. `ends` holds the end of each sequence's units."""
    before = ends <= unit
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)
