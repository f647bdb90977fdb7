"""Triton kernels, one operation a file: its plain torch reference, the kernel, and what launches it."""

import importlib.util
from functools import cache


@cache
def usable(device_type: str) -> bool:
    """Whether kernels can run there: torch for CUDA brings Triton along, but not on every platform."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


@cache
def dependent_launch() -> bool:
    """Whether a kernel may be launched while the one before it still runs (Hopper and later)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
