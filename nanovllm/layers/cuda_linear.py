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
LARGE_HIDDEN = 2048  # where weights are so large that the products, not the start, take the time
SOME_ROWS = 32  # to here cuBLAS's plain product is as fast as ours


class CudaLinear(Linear):
    """A single row only reads the weight, and norm, gate and residual cost nothing within the same kernel.

    For a few rows the kernels of a layer overlap: each asks for its weight before the one before it has ended. For tens
    of rows of a narrow model they are short, and what counts is that there are few of them and none waits for long.
    """

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, (out_features, hidden) = x.shape[0], self.weight.shape
        if num_rows == 1:
            return one_row_linear(x, self.weight, bias=self.bias, pdl=dependent_launch())
        if out_features < MANY_OUTPUTS:
            if num_rows <= FEW_ROWS:
                return few_rows_linear(x, self.weight, bias=self.bias, pdl=dependent_launch())
            if SOME_ROWS < num_rows <= TENS_OF_ROWS and self._is_narrow(hidden):
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
        few, half = num_rows <= FEW_ROWS, x.dtype != torch.float32
        if few and not (half and hidden >= LARGE_HIDDEN):
            return few_rows_linear(x, self.weight, bias=self.bias, gated=True, pdl=dependent_launch())
        if half and (few or (num_rows <= TENS_OF_ROWS and hidden <= LARGE_HIDDEN)):
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
        if FEW_ROWS < x.shape[0] <= MAX_ROWS_IN_PARTS and self._is_narrow(self.weight.shape[0]):
            return linear_in_parts(x, self.weight, self.bias, pdl=dependent_launch())
        return None

    def _is_narrow(self, hidden: int) -> bool:
        return hidden <= LARGE_HIDDEN and self.weight.dtype != torch.float32


class InvariantLinear(Linear):
    """The same order of additions for a row whatever the other rows are."""

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias)

    def gated_after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        return silu_and_mul(self(residual.normed(norm)), pdl=dependent_launch())
