"""Linear layers on a GPU: our own kernels or cuBLAS, by the number of rows, or one fixed kernel for all."""

from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.kernels.elementwise.silu_and_mul import silu_and_mul
from nanovllm.kernels.launch import dependent_launch, gluon_usable
from nanovllm.kernels.linear.few_rows import MAX_ROWS as FEW_ROWS
from nanovllm.kernels.linear.few_rows import few_rows_linear, few_rows_serves
from nanovllm.kernels.linear.matmul import matmul
from nanovllm.kernels.linear.one_row import one_row_linear
from nanovllm.kernels.linear.tiled import MAX_ROWS as HUNDREDS_OF_ROWS
from nanovllm.kernels.linear.tiled import split_k_linear, tiled_linear
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import THOUSANDS_OF_ROWS, Linear
from nanovllm.layers.residual import Residual

# Bounds within which a kernel measured faster than the others on an H200
SOME_ROWS = 32
TENS_OF_ROWS = 64  # to here tiles of ours beat cuBLAS for weights of any size, beyond for small ones
NARROW_HIDDEN = 1024
WIDE_HIDDEN = 2048  # from here on reading a weight takes the time, not starting to
ENOUGH_OUTPUTS = 5632  # for tiles on nearly every multiprocessor
MANY_OUTPUTS = 16384  # a vocabulary


class CudaLinear(Linear):
    """A single row only reads the weight, and norm, gate and residual cost nothing within the same kernel.

    For a few rows the kernels of a layer overlap: each asks for its weight before the one before it has ended. For tens
    of rows they are short, and what counts is that there are few of them and none waits for long. For thousands of rows
    the tensor cores are the limit, and the gate is worked out beside them.
    """

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows == 1:
            return one_row_linear(x, self.weight, bias=self.bias, pdl=dependent_launch())
        if self._by_few_rows(num_rows):
            return few_rows_linear(x, self.weight, bias=self.bias, pdl=dependent_launch())
        if self._by_tiles(num_rows):
            return tiled_linear(x, self.weight, self.bias, pdl=dependent_launch())
        if x.shape[1] <= WIDE_HIDDEN and (y := self._by_thousands(x, gated=False)) is not None:
            return y
        return super().__call__(x)

    def after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        y = self._with_norm(norm, residual, gated=False)
        return self(residual.normed(norm)) if y is None else y

    def gated_after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        y = self._with_norm(norm, residual, gated=True)
        if y is not None:
            return y
        x = residual.normed(norm)
        if self._half and x.shape[0] <= (HUNDREDS_OF_ROWS if x.shape[1] <= NARROW_HIDDEN else TENS_OF_ROWS):
            return tiled_linear(x, self.weight, self.bias, gated=True, pdl=dependent_launch())
        if (y := self._by_thousands(x, gated=True)) is not None:
            return y
        return silu_and_mul(super().__call__(x), pdl=dependent_launch())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return one_row_linear(x, self.weight, bias=self.bias, residual=residual, pdl=dependent_launch())
        if self._by_few_rows(x.shape[0]):
            return few_rows_linear(x, self.weight, bias=self.bias, residual=residual, pdl=dependent_launch())
        if self.bias is not None:
            residual += self.bias
        return residual.addmm_(x, self.weight.t())

    def split_k(self, x: Tensor) -> Tensor | None:
        num_rows, num_outputs = x.shape[0], self.weight.shape[0]
        most_rows = TENS_OF_ROWS
        if num_outputs <= WIDE_HIDDEN:
            most_rows = HUNDREDS_OF_ROWS if num_outputs <= NARROW_HIDDEN else HUNDREDS_OF_ROWS // 2
        if self._half and 1 < num_rows <= most_rows and not self._by_few_rows(num_rows):
            return split_k_linear(x, self.weight, self.bias, pdl=dependent_launch())
        return None

    def _with_norm(self, norm: RMSNorm, residual: Residual, *, gated: bool) -> Tensor | None:
        """By a kernel that norms on its own, where rows are so few, and short enough, that there is one."""
        if len(residual) == 1:
            kernel: Callable[..., Tensor] = one_row_linear
        elif self._by_few_rows(len(residual), gated=gated) and self.weight.shape[1] < WIDE_HIDDEN:
            kernel = few_rows_linear
        else:
            return None
        return kernel(
            residual.rows,
            self.weight,
            bias=self.bias,
            norm_weight=norm.weight,
            eps=norm.eps,
            gated=gated,
            pdl=dependent_launch(),
        )

    def _by_thousands(self, x: Tensor, *, gated: bool) -> Tensor | None:
        """By the kernel for thousands of rows, where there is one."""
        if x.shape[0] < THOUSANDS_OF_ROWS or not gluon_usable():
            return None
        from nanovllm.kernels.linear.many_rows import many_rows_linear, many_rows_serves

        return many_rows_linear(x, self.weight, gated=gated) if many_rows_serves(self.weight, self.bias) else None

    def _by_few_rows(self, num_rows: int, *, gated: bool = False) -> bool:
        num_outputs, num_inputs = self.weight.shape
        if not 1 < num_rows <= FEW_ROWS or not few_rows_serves(self.weight.dtype, num_inputs):
            return False
        if min(num_outputs, num_inputs) >= WIDE_HIDDEN:
            return num_inputs <= WIDE_HIDDEN and num_outputs < ENOUGH_OUTPUTS
        return gated or num_outputs < MANY_OUTPUTS

    def _by_tiles(self, num_rows: int) -> bool:
        num_outputs, num_inputs = self.weight.shape
        fewest = 2 if num_outputs >= ENOUGH_OUTPUTS else SOME_ROWS + 1
        most = HUNDREDS_OF_ROWS if num_inputs <= NARROW_HIDDEN else TENS_OF_ROWS
        return self._half and num_outputs < MANY_OUTPUTS and fewest <= num_rows <= most

    @property
    def _half(self) -> bool:
        return self.weight.dtype != torch.float32


class DeterministicLinear(Linear):
    """The same order of additions for a row whatever the other rows are."""

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias)

    def gated_after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        return silu_and_mul(self(residual.normed(norm)), pdl=dependent_launch())
