"""Linear layers on a GPU: our own kernels for a few rows, cuBLAS for many, or one fixed kernel for all."""

import torch
from torch import Tensor

from nanovllm.kernels import dependent_launch
from nanovllm.kernels.few_rows_linear import MAX_ROWS as FEW_ROWS
from nanovllm.kernels.few_rows_linear import few_rows_linear
from nanovllm.kernels.matmul import matmul
from nanovllm.kernels.one_row_linear import one_row_linear
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.tiled_linear import MAX_ROWS as TENS_OF_ROWS
from nanovllm.kernels.tiled_linear import MAX_ROWS_IN_PARTS, linear_in_parts, tiled_linear
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.residual import Residual

MANY_OUTPUTS = 16384  # from here on a kernel whose programs all read x for themselves falls behind cuBLAS
SOME_ROWS = 32  # to here tiles and parts of ours beat cuBLAS for weights of any size, beyond for small ones
LARGE_HIDDEN = 2048  # where a gate's weight is so large that the products, not the start, take the time
WIDE_HIDDEN = 4096  # where cuBLAS and parts beat a few rows' own kernel
NARROW_HIDDEN = 1024


class CudaLinear(Linear):
    """A single row only reads the weight, and norm, gate and residual cost nothing within the same kernel.

    For a few rows the kernels of a layer overlap: each asks for its weight before the one before it has ended. For tens
    of rows of a narrow model they are short, and what counts is that there are few of them and none waits for long.
    """

    def __call__(self, x: Tensor) -> Tensor:
        (num_rows, hidden), num_outputs = x.shape, self.weight.shape[0]
        if num_rows == 1:
            return one_row_linear(x, self.weight, bias=self.bias, pdl=dependent_launch())
        if num_outputs < MANY_OUTPUTS:
            if num_rows <= FEW_ROWS and not (self._half and hidden >= WIDE_HIDDEN):
                return few_rows_linear(x, self.weight, bias=self.bias, pdl=dependent_launch())
            if self._half and SOME_ROWS < num_rows <= TENS_OF_ROWS and hidden <= NARROW_HIDDEN:
                return tiled_linear(x, self.weight, self.bias, pdl=dependent_launch())
        return super().__call__(x)

    def after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        if len(residual) == 1:
            return one_row_linear(
                residual.rows,
                self.weight,
                bias=self.bias,
                norm_weight=norm.weight,
                eps=norm.eps,
                pdl=dependent_launch(),
            )
        return self(residual.normed(norm))

    def gated_after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        if len(residual) == 1:
            return one_row_linear(
                residual.rows,
                self.weight,
                bias=self.bias,
                norm_weight=norm.weight,
                eps=norm.eps,
                gated=True,
                pdl=dependent_launch(),
            )
        x = residual.normed(norm)
        num_rows, hidden = x.shape
        if num_rows <= FEW_ROWS and not (self._half and hidden >= LARGE_HIDDEN):
            return few_rows_linear(x, self.weight, bias=self.bias, gated=True, pdl=dependent_launch())
        if self._half and (num_rows <= SOME_ROWS or (num_rows <= TENS_OF_ROWS and hidden <= NARROW_HIDDEN)):
            return tiled_linear(x, self.weight, self.bias, gated=True, pdl=dependent_launch())
        return silu_and_mul(super().__call__(x), pdl=dependent_launch())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return one_row_linear(x, self.weight, bias=self.bias, residual=residual, pdl=dependent_launch())
        if x.shape[0] <= FEW_ROWS:
            return few_rows_linear(x, self.weight, bias=self.bias, residual=residual, pdl=dependent_launch())
        if self.bias is not None:
            residual += self.bias
        return residual.addmm_(x, self.weight.t())

    def in_parts(self, x: Tensor) -> Tensor | None:
        if self._half and x.shape[0] in _rows_in_parts(self.weight.shape[0]):
            return linear_in_parts(x, self.weight, self.bias, pdl=dependent_launch())
        return None

    @property
    def _half(self) -> bool:
        return self.weight.dtype != torch.float32


def _rows_in_parts(num_outputs: int) -> range:
    """For which adding up parts within the next norm measured faster on an H200 than adding in place."""
    if num_outputs <= NARROW_HIDDEN:
        return range(FEW_ROWS + 1, MAX_ROWS_IN_PARTS + 1)
    if num_outputs <= LARGE_HIDDEN:
        return range(FEW_ROWS + 1, TENS_OF_ROWS + 1)
    return range(2 if num_outputs >= WIDE_HIDDEN else FEW_ROWS + 1, SOME_ROWS + 1)


class InvariantLinear(Linear):
    """The same order of additions for a row whatever the other rows are."""

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias)

    def gated_after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        return silu_and_mul(self(residual.normed(norm)), pdl=dependent_launch())
