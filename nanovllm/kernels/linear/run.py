"""The linear kernels of kernels/select.py by name, each as a function of x with the weight bound to it.

All take `norm`, `gated` and `residual` where the table says that they fuse it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor


class Norm(Protocol):
    weight: Tensor
    eps: float
    fuses: bool  # its weight has the type of the rows


class Stream(Protocol):
    """A residual stream."""

    @property
    def rows(self) -> Tensor: ...  # with everything added
    def normed(self, norm: Any) -> Tensor: ...
    def take(self) -> tuple[Tensor, Tensor | None]: ...  # rows, and partial sums that the caller adds to them in place


def runner(name: str, weight: dict[str, Any], bias: Tensor | None, *, pdl: bool) -> Callable[..., Tensor]:
    """`weight`: a format's kernel arguments, "weight" and maybe "scale"."""
    if name == "cublas":
        return partial(_cublas, weight["weight"], bias)
    if name == "cublas_bias":
        return partial(_cublas_bias, weight["weight"], bias)
    if name == "dequantized":
        return partial(_dequantized, **weight, bias=bias)
    if name == "packed_deterministic":
        from nanovllm.kernels.linear.packed_tiled import packed_deterministic

        return partial(packed_deterministic, **weight, bias=bias)
    if name == "packed_dequantized":
        return partial(_packed_dequantized, **weight, bias=bias, pdl=pdl)
    if name == "packed_many_rows":
        return partial(_packed_many_rows, **weight, pdl=pdl)
    if name == "deterministic":
        from nanovllm.kernels.linear.matmul import matmul

        return partial(_with_norm, matmul, **weight, bias=bias)
    if name == "many_rows":
        from nanovllm.kernels.linear.many_rows import many_rows_linear

        return partial(_with_norm, many_rows_linear, **weight)
    if name in ("packed_wide", "packed_wide_split_k"):
        from nanovllm.kernels.linear import packed_wide

        launch = packed_wide.packed_wide_linear if name == "packed_wide" else packed_wide.packed_wide_split_k_linear
        return partial(launch, **weight, bias=bias, pdl=pdl)
    if name in ("packed_at_once", "packed_at_once_split_k"):
        from nanovllm.kernels.linear import packed_at_once as at_once

        split = name == "packed_at_once_split_k"
        linear = at_once.packed_at_once_split_k_linear if split else at_once.packed_at_once_linear
        return partial(linear, **weight, bias=bias, pdl=pdl)
    if name in ("fp8_some_rows", "fp8_some_rows_split_k"):
        from nanovllm.kernels.linear.fp8_some_rows import fp8_some_rows_linear, fp8_some_rows_split_k_linear

        if name == "fp8_some_rows":
            return partial(_with_norm_and_sums, fp8_some_rows_linear, **weight, bias=bias, pdl=pdl)
        return partial(fp8_some_rows_split_k_linear, **weight, bias=bias, pdl=pdl)
    if name in ("fp8_scaled_mm", "fp8_scaled_mm_sum"):
        from nanovllm.kernels.linear.fp8_inputs import scaled_mm_linear

        return partial(_with_norm_and_sums if name == "fp8_scaled_mm" else _one_sum, scaled_mm_linear, **weight)
    if name in ("fp8_many_rows", "fp8_many_rows_sum"):
        from nanovllm.kernels.linear.fp8_many_rows import fp8_many_rows_linear

        run = _with_norm_and_sums if name == "fp8_many_rows" else _one_sum
        return partial(run, fp8_many_rows_linear, **weight, bias=bias)
    if name == "one_row":
        from nanovllm.kernels.linear.one_row import one_row_linear

        return partial(_with_any_norm, one_row_linear, **weight, bias=bias, pdl=pdl)
    return partial(_with_norm, _launcher(name), **weight, bias=bias, pdl=pdl)


def _launcher(name: str) -> Callable[..., Tensor]:
    from nanovllm.kernels.linear import few_rows, fp8_inputs, packed_rows, packed_tiled, tiled

    launchers: dict[str, Callable[..., Tensor]] = {
        "few_rows": few_rows.few_rows_linear,
        "tiled": tiled.tiled_linear,
        "split_k": tiled.split_k_linear,
        "fp8": fp8_inputs.fp8_linear,
        "fp8_split_k": fp8_inputs.fp8_split_k_linear,
        "packed_rows": packed_rows.packed_rows_linear,
        "packed_tiled": packed_tiled.packed_tiled_linear,
        "packed_split_k": packed_tiled.packed_split_k_linear,
    }
    return launchers[name]


def _with_norm(launch: Callable[..., Tensor], x: Any, *, norm: Norm | None = None, **arguments: Any) -> Tensor:
    """`x`: a tensor, or before a norm a `Stream`."""
    if norm is None or norm.fuses:
        return _with_any_norm(launch, x, norm=norm, **arguments)
    return launch(x.normed(norm), **arguments)


def _with_any_norm(launch: Callable[..., Tensor], x: Any, *, norm: Norm | None = None, **arguments: Any) -> Tensor:
    """As `_with_norm`, for kernels that take a norm's weight of another type, too."""
    if norm is None:
        return launch(x, **arguments)
    return launch(x.rows, norm_weight=norm.weight, eps=norm.eps, **arguments)


def _with_norm_and_sums(launch: Callable[..., Tensor], x: Any, *, norm: Norm | None = None, **arguments: Any) -> Tensor:
    """As `_with_norm`, for kernels that also add what is pending to the rows."""
    if norm is None or not norm.fuses:
        return launch(x if norm is None else x.normed(norm), **arguments)
    rows, partial_sums = x.take()
    return launch(rows, norm_weight=norm.weight, eps=norm.eps, partial_sums=partial_sums, **arguments)


def _one_sum(launch: Callable[..., Tensor], x: Tensor, **arguments: Any) -> Tensor:
    """[1, rows, outputs]: one partial sum, rounded to x's type."""
    return launch(x, **arguments)[None]


def _cublas(weight: Tensor, bias: Tensor | None, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return F.linear(x, weight, bias)
    if bias is not None:
        residual += bias
    return residual.addmm_(x, weight.t())


def _cublas_bias(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """[1, rows, outputs]: one partial sum, rounded to x's type."""
    return F.linear(x, weight, bias)[None]


def _dequantized(x: Tensor, *, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from nanovllm.kernels.linear.dequantize import dequantize

    return F.linear(x, dequantize(weight, scale, x.dtype), bias)


def _packed_dequantized(
    x: Tensor, *, weight: Any, bias: Tensor | None, pdl: bool, residual: Tensor | None = None
) -> Tensor:
    from nanovllm.kernels.linear.packed_dequantize import packed_dequantize

    return _cublas(packed_dequantize(weight, x.dtype, pdl=pdl), bias, x, residual=residual)


def _packed_many_rows(x: Tensor, *, weight: Any, pdl: bool, gated: bool = False) -> Tensor:
    from nanovllm.kernels.linear.many_rows import many_rows_linear
    from nanovllm.kernels.linear.packed_dequantize import packed_dequantize

    return many_rows_linear(x, packed_dequantize(weight, x.dtype, pdl=pdl), gated=gated)
