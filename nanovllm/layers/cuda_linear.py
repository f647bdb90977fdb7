"""Linear layers on a GPU: our own kernels for a few rows, cuBLAS for many, or one fixed kernel for all."""

from torch import Tensor

from nanovllm.kernels import dependent_launch
from nanovllm.kernels.linear import MAX_ROWS, fused_linear
from nanovllm.kernels.matmul import matmul
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear

WIDE = 32768  # outputs from which on cuBLAS is faster unless there is a single row


class CudaLinear(Linear):
    """A step of few rows only reads weights, and there norm, gate and residual cost nothing within the same kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        if self._suits(x):
            return fused_linear(x, self.weight, bias=self.bias, pdl=_pdl(x))
        return super().__call__(x)

    def after_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if self._suits(x):
            return fused_linear(x, self.weight, bias=self.bias, norm_weight=norm.weight, eps=norm.eps, pdl=_pdl(x))
        return super().__call__(norm(x))

    def gated_after_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if self._suits(x):
            return fused_linear(
                x, self.weight, bias=self.bias, norm_weight=norm.weight, eps=norm.eps, gated=True, pdl=_pdl(x)
            )
        return silu_and_mul(super().__call__(norm(x)), pdl=dependent_launch())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._suits(x):
            return fused_linear(x, self.weight, bias=self.bias, residual=residual, pdl=_pdl(x))
        if self.bias is not None:
            residual += self.bias
        return residual.addmm_(x, self.weight.t())

    def _suits(self, x: Tensor) -> bool:
        """Whether our kernel is the faster one."""
        num_rows = x.shape[0]
        return num_rows == 1 or (num_rows <= MAX_ROWS and self.weight.shape[0] <= WIDE)


def _pdl(x: Tensor) -> bool:
    return x.shape[0] == 1 and dependent_launch()


class InvariantLinear(Linear):
    """The same order of additions for a row whatever the other rows are."""

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias)

    def gated_after_norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return silu_and_mul(self(norm(x)), pdl=dependent_launch())
