"""Linear layers on a GPU: our own kernels for a few rows, cuBLAS for many, or one fixed kernel for all."""

from torch import Tensor

from nanovllm.kernels import dependent_launch
from nanovllm.kernels.few_rows_linear import MAX_ROWS, few_rows_linear
from nanovllm.kernels.matmul import matmul
from nanovllm.kernels.one_row_linear import one_row_linear
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear


class CudaLinear(Linear):
    """A single row only reads the weight, and norm, gate and residual cost nothing within the same kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return one_row_linear(x, self.weight, bias=self.bias, pdl=dependent_launch())
        return super().__call__(x)

    def after_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return one_row_linear(
                x, self.weight, bias=self.bias, norm_weight=norm.weight, eps=norm.eps, pdl=dependent_launch()
            )
        return super().__call__(norm(x))

    def gated_after_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return one_row_linear(
                x,
                self.weight,
                bias=self.bias,
                norm_weight=norm.weight,
                eps=norm.eps,
                gated=True,
                pdl=dependent_launch(),
            )
        return silu_and_mul(super().__call__(norm(x)), pdl=dependent_launch())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return one_row_linear(x, self.weight, bias=self.bias, residual=residual, pdl=dependent_launch())
        if x.shape[0] <= MAX_ROWS:
            return few_rows_linear(x, self.weight, self.bias, residual, pdl=dependent_launch())
        if self.bias is not None:
            residual += self.bias
        return residual.addmm_(x, self.weight.t())


class InvariantLinear(Linear):
    """The same order of additions for a row whatever the other rows are."""

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias)

    def gated_after_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return silu_and_mul(self(norm(x)), pdl=dependent_launch())
