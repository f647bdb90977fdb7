"""Tiles of the kernel in many_rows.py: how many warpgroups multiply one, and how busy a GPU is with them. No torch.

The tiles of a product run in waves, one tile per multiprocessor at a time. A last wave with few tiles takes as long as
a full one.
"""

GROUP_ROWS = 64  # of x per warpgroup
TILE_OUTPUTS = 256
MULTIPROCESSORS = 132  # of the GPU that was measured
MANY_ROWS = 4096  # from here on the power limit lowers the clock: a tile of three groups reads less of the weight
LONG_INPUTS = 4096  # with shorter ones three groups wait for their stores too often


def num_groups(rows: int, outputs: int, inputs: int, *, gated: bool) -> int:
    """Two or three consumer warpgroups, whichever takes less time."""
    if not gated or inputs < LONG_INPUTS:
        return 2
    return 3 if rows >= MANY_ROWS or _group_waves(rows, outputs, 3) < _group_waves(rows, outputs, 2) else 2


def utilization(rows: int, outputs: int, inputs: int, *, gated: bool) -> float:
    """The share of the tiles' time in which multiprocessors compute rows that exist."""
    full = rows * outputs / (GROUP_ROWS * TILE_OUTPUTS * MULTIPROCESSORS)
    return full / _group_waves(rows, outputs, num_groups(rows, outputs, inputs, gated=gated))


def _group_waves(rows: int, outputs: int, groups: int) -> int:
    """The number of waves, each counted as often as its tiles have groups, which take turns on the tensor cores."""
    tiles = -(-rows // (groups * GROUP_ROWS)) * (outputs // TILE_OUTPUTS)
    return groups * -(-tiles // MULTIPROCESSORS)
