"""State of every running sequence, whatever its length: one tensor per row of the request table. No torch."""

import math
from dataclasses import dataclass

from nanovllm.state import DTYPE_BYTES


@dataclass(frozen=True)
class RowState:
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def bytes_per_row(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]
