"""Whether our Triton kernels run on a device. No torch."""

import importlib.util
from functools import cache


@cache
def usable(device_type: str) -> bool:
    """torch for CUDA includes Triton on most platforms only."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None
