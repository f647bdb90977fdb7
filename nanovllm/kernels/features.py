"""What a GPU has for our kernels: Triton, Gluon, programmatic dependent launch. Facts that never change."""

from functools import cache

import torch

from nanovllm.kernels.device import usable


@cache
def dependent_launch() -> bool:
    """Whether the device supports programmatic dependent launch: starting a kernel before its predecessor has ended.

    Hopper and later do.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@cache
def gluon_usable() -> bool:
    """Whether the Gluon kernels run here: on Hopper, with a Triton version that compiles them.

    The language is experimental and changes between versions; the range below is tested.
    """
    import triton

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    return (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)


def features_of(device_type: str) -> dict[str, bool]:
    """What runs on the device: our Triton `kernels`, those in `gluon`, and programmatic dependent launch (`pdl`)."""
    kernels = usable(device_type)
    return {"kernels": kernels, "gluon": kernels and gluon_usable(), "pdl": kernels and dependent_launch()}
