"""Tiles of the kernel in packed_wide.py: their shapes, what of a multiprocessor they use, and which is the fastest."""

from dataclasses import dataclass
from functools import cache

from nanovllm.kernels.launch import cdiv
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.select import SUMMED_GROUP

SLAB_ROWS = 64  # of the weight per consumer warpgroup
SYNCHRONOUS_ROWS = 16  # up to this many rows of x wgmma, which is asynchronous, has no advantage over mma
PRODUCER_REGISTERS = 24
SHARED_BYTES = 208 * 1024  # for the rings and sums: the compiler takes some to transpose results
WORDS_BYTES = 80 * 1024  # of them for the words, at most
MAX_STAGES = 16
MAX_SPLITS = 4
SUMMED_ROWS = 64  # up to this many rows of x it is cheaper to scale sums of products than the weight
ROW_CLASSES = (
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    2048,
)  # numbers of rows up to which one tile is taken: each is compiled for itself


@dataclass(frozen=True)
class WideTile:
    block_m: int  # rows of x
    slabs: int  # of 64 rows of the weight
    k_parts: int = 1  # warpgroups that share a slab: they take spans of K in turn
    programs: int = 1  # per multiprocessor

    @property
    def rows(self) -> int:  # of the weight
        return self.slabs * SLAB_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread when the kernel starts, and of consumers when producers have given most of theirs back. The two
        producer warps count as four."""
        groups = self.slabs * self.k_parts
        start = 512 // (groups + 1) // self.programs // 8 * 8
        return start, ((groups + 1) * start - PRODUCER_REGISTERS) // groups // 8 * 8

    def scales_weight(self, weight: PackedWords) -> bool:
        """Whether numbers are multiplied with their scales before the product, otherwise sums of products are."""
        num_groups = weight.scale.shape[-1]
        group = weight.shape[-1] // num_groups
        return num_groups > 1 and (self.block_m > SUMMED_ROWS or group < SUMMED_GROUP)

    def stages(self, weight: PackedWords) -> tuple[int, int]:
        """How many stages the ring of words and the ring of inputs have: as many as fit in shared memory, with the same
        number for each K part."""
        few = self.block_m <= SYNCHRONOUS_ROWS
        x_bytes = self.block_m * weight.distance * 2  # of a pair of each word
        span_bytes, words_bytes = weight.num_pairs * x_bytes, self.rows * weight.distance * 2
        each = (SHARED_BYTES - (self.k_parts - 1) * self.rows * self.block_m * 4) // self.k_parts
        for_words = each - 2 * span_bytes if few else min(WORDS_BYTES // self.k_parts, each - span_bytes)
        most = MAX_STAGES // self.k_parts
        stages = min(for_words // words_bytes, most)
        x_stages = min((each - stages * words_bytes) // (span_bytes if few else x_bytes), most)
        return stages * self.k_parts, x_stages * self.k_parts


# Microseconds of one program for MEASURED_K columns of an int4 weight, by bench/packed_kernels.py on an H200; of them,
# those that do not depend on the number of columns; and those for adding the sums of one more part of K elsewhere.
MICROSECONDS = {
    WideTile(8, 1, 3): 8.4,
    WideTile(8, 3): 21.2,
    WideTile(16, 1, 3): 9.0,
    WideTile(16, 3): 23.5,
    WideTile(32, 1, 2): 10.4,
    WideTile(32, 3): 24.0,
    WideTile(64, 1, 2): 12.5,
    WideTile(64, 3): 29.5,
    WideTile(128, 1, 2): 16.0,
    WideTile(128, 2): 28.0,
    WideTile(128, 3): 37.5,
    WideTile(256, 2): 43.5,
}
MEASURED_K = 4096
START, PER_SPLIT = 3.0, 0.5


@cache
def wide_tile(m: int, num_weight_rows: int, k: int, *, most_splits: int, num_sms: int) -> tuple[WideTile, int]:
    """The tile, and the number of parts of K that programs of their own compute, with the smallest estimated time."""
    rows = next((size for size in ROW_CLASSES if m <= size), m)

    def microseconds(choice: tuple[WideTile, int]) -> float:
        tile, splits = choice
        programs = cdiv(rows, tile.block_m) * cdiv(num_weight_rows, tile.rows) * splits
        each = START + (MICROSECONDS[tile] - START) * k / MEASURED_K / splits
        return cdiv(programs, num_sms) * each + PER_SPLIT * splits

    choices = [(tile, splits) for tile in MICROSECONDS for splits in (1, 2, MAX_SPLITS) if splits <= most_splits]
    return min(choices, key=microseconds)
