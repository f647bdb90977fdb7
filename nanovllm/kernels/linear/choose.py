"""Chooses the kernel that runs a linear, by the table in kernels/select.py, and binds the weight to it."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.run import runner
from nanovllm.kernels.select import PACKED, LinearCase, LinearKernel, select_linear


class PackedWeight(Protocol):
    format_name: str

    @property
    def shape(self) -> tuple[int, ...]: ...  # [outputs, inputs]
    def kernel_arguments(self) -> dict[str, Any]: ...


class Chosen(NamedTuple):
    run: Callable[..., Tensor]  # (x), with `norm`, `gated` and `residual` where the kernel takes them
    kernel: LinearKernel


def linear_case(
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    rows: int,
    gated: bool,
    added: bool,
    whole: bool,
    dtype: torch.dtype,
    deterministic: bool,
    gluon: bool,
) -> LinearCase:
    """See `LinearCase` for the arguments."""
    words = weight.kernel_arguments()["weight"] if weight.format_name in PACKED else None
    packed = words if isinstance(words, PackedWords) else None
    return LinearCase(
        format=weight.format_name,
        rows=rows,
        outputs=weight.shape[0],
        inputs=weight.shape[1],
        half=dtype.itemsize == 2,
        bfloat16=dtype == torch.bfloat16,
        bias=bias is not None,
        gated=gated,
        added=added,
        whole=whole,
        deterministic=deterministic,
        gluon=gluon,
        distance=0 if packed is None else packed.distance,
        group=0 if packed is None else packed.shape[-1] // packed.scale.shape[-1],
        scale_rows=1 if packed is None else packed.scale_rows,
        rounds_inputs=packed is not None and packed.rounds_inputs,
        minimum=packed is not None and packed.minimum is not None,
    )


def choose_kernel(
    weight: PackedWeight, bias: Tensor | None, *, deterministic: bool, pdl: bool, **case: Any
) -> Chosen | None:
    """None if the plain product on torch is to be used. `case`: as of `linear_case`."""
    kernel = select_linear(linear_case(weight, bias, deterministic=deterministic, **case))
    if kernel is None:
        if deterministic:
            raise ConfigError(f"deterministic=True: no deterministic kernel computes {weight.format_name} weights yet")
        return None
    return Chosen(runner(kernel.name, weight.kernel_arguments(), bias, pdl=pdl), kernel)
