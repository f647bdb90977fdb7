"""Where kernels are tested: on the GPU, or without one on the CPU through Triton's interpreter."""

from collections.abc import Sequence

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.bfloat16, torch.float16]


def with_halves(sizes: Sequence[int]) -> list[tuple[torch.dtype, int]]:
    """Each size with both types of 16 bits; in the interpreter, which is slow, with one of them in turn."""
    if DEVICE == "cuda":
        return [(dtype, size) for dtype in HALVES for size in sizes]
    return [(HALVES[turn % 2], size) for turn, size in enumerate(sizes)]
