"""The product with a weight that is dequantized tile by tile, so that never all of it exists in full."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_WEIGHTS = 1 << 24  # dequantized at a time: 64 MB in float32


def matmul_by_tiles(
    x: Tensor,  # [rows, in]
    shape: tuple[int, int],  # of the weight, [out, in]
    dequantized: Callable[[slice], Tensor],  # some rows of the weight
    *,
    multiple_of: int = 1,  # rows of a tile
) -> Tensor:
    """[rows, out]"""
    step = multiple_of * max(1, TILE_WEIGHTS // (shape[1] * multiple_of))
    tiles = [slice(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]
    return torch.cat([F.linear(x, dequantized(tile)) for tile in tiles], dim=1)
