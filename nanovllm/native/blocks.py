"""Where blocks of GGUF files have the codes of packed weights, as src/weights.c reads them."""

import ctypes

from nanovllm.checkpoint.gguf_header import BLOCKS
from nanovllm.weights.forms import GroupForm


class Blocks(ctypes.Structure):
    """See src/products.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("columns", "bytes", "bits", "low_at", "low_together", "high_at", "high_together")
    )


_CODES = {  # bits of a code, where its low bits are, and where its high bits
    "Q4_0": (4, 2, 16),
    "Q4_1": (4, 4, 16),
    "Q5_0": (5, 6, 16, 2, 1),
    "Q5_1": (5, 8, 16, 4, 1),
    "Q8_0": (8, 2, 1),
    "Q4_K": (4, 16, 32),
    "Q5_K": (5, 48, 32, 16, 32),
    "Q6_K": (6, 0, 64, 128, 32),
}
IN_FILES = {kind: Blocks(*BLOCKS[kind], *codes) for kind, codes in _CODES.items()}


def row_bytes(kind: str, form: GroupForm, columns: int) -> int:
    """Bytes that a row of a packed weight takes in memory. `form`: the form of this GGUF type; its units may be smaller
    than in the file."""
    scale = columns // form.group_size * (1 if form.unit_size else 2)
    unit = columns // form.unit_size * 2 if form.unit_size else 0
    return columns * IN_FILES[kind].bits // 8 + (scale + unit) * (2 if form.minimum else 1)
