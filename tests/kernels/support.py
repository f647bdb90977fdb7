"""The device for kernel tests: the GPU, or without one the CPU with Triton's interpreter."""

from collections.abc import Sequence

import torch

from tests.kernels.fast_interpreter import speed_up

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.bfloat16, torch.float16]


def with_halves(sizes: Sequence[int]) -> list[tuple[torch.dtype, int]]:
    """Each size with both 16-bit types; in the slow interpreter, with one of them alternately."""
    if DEVICE == "cuda":
        return [(dtype, size) for dtype in HALVES for size in sizes]
    return [(HALVES[turn % 2], size) for turn, size in enumerate(sizes)]


if DEVICE == "cpu":
    speed_up()
