"""Tile shapes of the expert kernels, chosen by type and by the mean number of tokens per expert."""

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
