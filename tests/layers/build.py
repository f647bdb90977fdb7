"""Layers built alone, on one rank, for tests."""

from typing import Any

import torch

from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.spec import Dim, linear_weights, norm_weight

CPU = torch.device("cpu")


def context(dtype: torch.dtype = torch.float32, device: torch.device = CPU, **settings: Any) -> BuildContext:
    return BuildContext(dtype=dtype, device=device, attention=None, **settings)  # type: ignore[arg-type]


def make_linear(inputs: int, outputs: int, built_with: BuildContext, *, bias: bool = False) -> Linear:
    return Linear(linear_weights(("linear",), (Dim(outputs),), Dim(inputs), bias=bias), built_with)


def make_norm(size: int, built_with: BuildContext, *, eps: float = 1e-6, offset: float | None = None) -> RMSNorm:
    return RMSNorm(norm_weight(size, offset), built_with, eps=eps)
