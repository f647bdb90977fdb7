"""Tiles of the kernel in packed_at_once.py: the fastest for Qwen3-8B's linears on an H200, in a chain of its layers."""

from dataclasses import dataclass
from functools import cache

WARP_BITS = 1024  # of a row of the weight that a warp multiplies in one step
REGISTERS = 1 << 16  # of a multiprocessor
MOST_BYTES = 96 * 1024  # of the words of a program: two of them share a multiprocessor
MANY_BYTES = 80 * 1024  # of two blocks of rows
BYTES_OF_8_BITS = 48 * 1024  # of a program that computes a part of K
MOST_PROGRAMS = 3 * 132  # that run at the same time
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class AtOnceTile:
    sixteens: int  # blocks of sixteen rows of the weight per program, which read the same x
    num_warps: int  # that divide K
    splits: int = 1  # parts of K that programs of their own compute
    programs: int = 3  # per multiprocessor that registers are limited for

    def divides(self, k: int, bits: int) -> bool:
        return k * bits % (WARP_BITS * self.num_warps * self.splits) == 0

    def num_bytes(self, k: int, bits: int) -> int:
        return 2 * self.sixteens * k * bits // self.splits

    @property
    def registers(self) -> int:
        """Per thread."""
        return min(255, REGISTERS // (32 * self.num_warps * self.programs) // 8 * 8)


@cache
def at_once_tile(num_weight_rows: int, k: int, bits: int, *, split: bool) -> AtOnceTile | None:
    """None: no tile fits. `split`: K may be divided among programs."""
    if bits == 8:
        found = [AtOnceTile(1, 8, n) for n in SPLITS if n == 1 or split]
        if split:
            found = [tile for tile in found if tile.num_bytes(k, bits) <= BYTES_OF_8_BITS]
            found = [AtOnceTile(1, 4, one.splits, 6) if k // one.splits <= 2048 else one for one in found]
    elif split:
        found = [AtOnceTile(sixteens, 4, n) for sixteens in (4, 2) for n in SPLITS]

        def order(tile: AtOnceTile) -> tuple[int, bool, int]:
            programs = num_weight_rows * tile.splits // (16 * tile.sixteens)
            waits = programs > MOST_PROGRAMS
            return -tile.sixteens, waits, programs if waits else -programs

        found.sort(key=order)
    else:
        found = [AtOnceTile(2, 8, programs=2), AtOnceTile(2, 4), AtOnceTile(1, 8), AtOnceTile(1, 4, programs=4)]
        found = [tile for tile in found if tile.sixteens == 1 or tile.num_bytes(k, bits) <= MANY_BYTES]
    fits = (tile for tile in found if tile.divides(k, bits) and tile.num_bytes(k, bits) <= MOST_BYTES)
    return next(fits, None)
