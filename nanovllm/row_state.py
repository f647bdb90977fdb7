"""State of every running sequence, whatever its length: one tensor per row of the request table. No torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.state import DTYPE_BYTES

if TYPE_CHECKING:
    from nanovllm.config import Config, SchedulerConfig

ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class RowState:
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_per_row(self) -> int:
        return -(-self.size * DTYPE_BYTES[self.dtype] // ALIGNMENT) * ALIGNMENT


def num_checkpoints(config: "Config | SchedulerConfig") -> int:
    """Copies of a row's state for the prefix cache: for each of max_num_seqs one after its prompt, and its newest."""
    return 2 * config.max_num_seqs * config.enable_prefix_caching


def num_states(config: "Config") -> int:
    """Copies of a row's state in all: of the rows, row 0 included, and checkpoints."""
    return config.max_num_seqs + 1 + num_checkpoints(config)
