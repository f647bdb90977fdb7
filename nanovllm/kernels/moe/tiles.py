"""Tile shapes of the expert kernels, chosen by type and by the mean number of tokens per expert."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Tile(NamedTuple):
    """The tile of a weight that one program multiplies, and its launch options."""

    block_n: int  # rows of the weight, columns of the result
    block_k: int
    num_warps: int
    num_stages: int
    weight_left: bool = False  # compute W x^T: wgmma takes 64 rows on the left, which few tokens would not fill

    @property
    def options(self) -> dict[str, Any]:
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class Tiles(NamedTuple):
    block_m: int  # pairs per block
    gate_up: Tile
    down: Tile


DECODE_TILES = Tiles(16, gate_up=Tile(32, 128, 4, 4), down=Tile(64, 128, 4, 4))
MEDIUM_TILES = Tiles(32, gate_up=Tile(64, 64, 4, 4, weight_left=True), down=Tile(64, 128, 4, 4, weight_left=True))
LARGE_TILES = Tiles(64, gate_up=Tile(64, 64, 4, 4), down=Tile(128, 64, 4, 4))
PREFILL_TILES = Tiles(128, gate_up=Tile(128, 64, 8, 3), down=Tile(128, 64, 8, 4))
# float32 products do not run on tensor cores: small tiles, so that the accumulator fits in registers
FLOAT32_DECODE_TILES = Tiles(16, gate_up=Tile(32, 32, 4, 3), down=Tile(32, 32, 4, 3))
FLOAT32_PREFILL_TILES = Tiles(64, gate_up=Tile(32, 32, 4, 3), down=Tile(64, 32, 4, 3))


def choose_tiles(pairs_per_expert: float, dtype: torch.dtype, *, deterministic: bool) -> Tiles:
    """`deterministic` uses the same tiles for any number of tokens."""
    if dtype == torch.float32:
        return FLOAT32_PREFILL_TILES if deterministic or pairs_per_expert > 32 else FLOAT32_DECODE_TILES
    if deterministic:
        return LARGE_TILES
    if pairs_per_expert <= 8:
        return DECODE_TILES
    if pairs_per_expert <= 24:
        return MEDIUM_TILES
    return LARGE_TILES if pairs_per_expert <= 96 else PREFILL_TILES


def row_tiles(dtype: torch.dtype, *, shared: bool = False) -> tuple[Tile, Tile]:
    """Tiles of gate_up and down for the kernels of rows.py. `shared`: a shared expert is computed beside."""
    if shared and dtype != torch.float32:
        return Tile(4, 256, 2, 1), Tile(4, 256, 4, 1)
    block_k = 256 if dtype == torch.float32 else 512
    return Tile(4, block_k, 4, 1), Tile(4, 256, 4, 1)


# --- fp8_experts.py ---------------------------------------------------------------------------------------------------

SINGLE_TOKENS = 1  # up to so many, every pair reads its expert
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Fp8ExpertTile:
    block_m: int  # pairs of a block
    slabs: int  # of 64 rows of the weight, each for one consumer warpgroup
    stages: int
    programs: int = 1  # for each multiprocessor
    resident: int = 1  # that a multiprocessor's registers are enough for, those of the next kernel included

    @property
    def registers(self) -> tuple[int, int, int]:
        """Per thread when the kernel starts, later of consumers, and of the two warps that load, which count as four
        and give back what they do not need."""
        threads = 128 * (self.slabs + 1)
        start = min(REGISTERS // (threads * self.resident) // 8 * 8, 248)
        loading = 24 if self.block_m <= 32 else 40 if self.block_m <= 64 else 72
        return start, min(((self.slabs + 1) * start - loading) // self.slabs // 8 * 8, 248), loading


def fp8_expert_tiles(num_tokens: int, num_experts: int, top_k: int) -> tuple[Fp8ExpertTile, Fp8ExpertTile]:
    """The tiles of gate_up and of down, which share blocks: the fastest ones measured on an H200 for Qwen3-30B-A3B at
    1 to 2,048 and at 8,192 tokens."""
    if num_tokens <= SINGLE_TOKENS:
        return Fp8ExpertTile(8, 1, 10, 2, 3), Fp8ExpertTile(8, 1, 6, 2, 4)
    pairs_per_expert = num_tokens * top_k / num_experts
    if pairs_per_expert <= 2:
        return (Fp8ExpertTile(8, 2, 6, 2, 2),) * 2
    if pairs_per_expert <= 8:
        return (Fp8ExpertTile(16, 4, 6),) * 2
    return (Fp8ExpertTile(32, 4, 5),) * 2 if pairs_per_expert <= 32 else (Fp8ExpertTile(64, 4, 5),) * 2
