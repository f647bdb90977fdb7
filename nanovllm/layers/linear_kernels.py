"""The kernels of linears on one device."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from nanovllm.kernels.elementwise.silu_and_mul import silu_and_mul
from nanovllm.kernels.linear.choose import choose_kernel
from nanovllm.kernels.select import row_class
from nanovllm.layers.context import BuildContext
from nanovllm.layers.spec import Activation


class LinearKernels:
    def __init__(self, context: BuildContext) -> None:
        self.row_class = row_class
        self.choose = partial(
            choose_kernel,
            dtype=context.dtype,
            deterministic=context.deterministic,
            gluon=context.gluon,
            pdl=context.pdl,
        )
        self._pdl = context.pdl

    def gate(self, activation: Activation | None) -> Callable[[Tensor], Tensor]:
        return partial(silu_and_mul, gelu=activation == "gelu", pdl=self._pdl)
