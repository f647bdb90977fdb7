"""The kernels of linears on one device."""

from functools import partial

from nanovllm.kernels.elementwise.silu_and_mul import silu_and_mul
from nanovllm.kernels.linear.choose import choose_kernel
from nanovllm.kernels.select import row_class
from nanovllm.layers.context import BuildContext


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
        self.silu_and_mul = partial(silu_and_mul, pdl=context.pdl)
