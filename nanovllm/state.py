"""What layers keep between steps: a KV cache in blocks of tokens, or one tensor per running sequence. No torch."""

import math
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class PagedState:
    """State of every token, such as keys and values, kept in blocks."""

    bytes_per_token: int
    window: int | None = None  # tokens that are read at most, the newest included; older ones may be forgotten


@dataclass(frozen=True)
class RowState:
    """State of every running sequence, whatever its length: one tensor per row of the request table."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def bytes_per_row(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]
