"""y = x W^T + b, with an optional norm before it, an activation after it, or a residual to add it to.

The weight's format stores and multiplies it. Where kernels/select.py knows a kernel that fuses norm, activation or
residual for this format, number of rows, shape and device, it runs; otherwise plain operations are composed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.distributed.group import ALONE
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import Activation, Weight
from nanovllm.weights.dense import DenseWeight

if TYPE_CHECKING:
    from nanovllm.weights.format import StoredWeight


@dataclass(frozen=True)
class Operation:
    """How a linear is computed for one number of rows and one combination of keywords."""

    run: Callable[..., Tensor]  # (x), with `norm`, `gated` and `residual` where it takes them
    norm: bool
    gate: bool
    add: bool
    splits: bool = False  # gives partial sums, [splits, rows, out]


class Linear:
    def __init__(self, weights: dict[str, Weight], context: BuildContext, *, shared: Any = None) -> None:
        """`weights`: "weight" and maybe "bias". `shared`: an embedding's weight, used in place of its own."""
        self._context = context
        self._spec = weights
        group = context.group
        spec = weights["weight"]
        shape = spec.shard_shape(group.rank, group.size)
        if shared is None:
            form = context.format_of(spec)
            self.weight: StoredWeight = form.empty(shape, dtype=context.dtype, device=context.device)
        else:
            self.weight = shared
        self._shared = shared is not None
        self.bias: Tensor | None = None
        if "bias" in weights and (group.rank == 0 or not weights["bias"].on_first_rank):
            (size,) = weights["bias"].shard_shape(group.rank, group.size)
            self.bias = torch.empty(size, dtype=context.dtype, device=context.device)
        divided = spec.columns is not None and spec.columns.divided is not None
        self._group = group if divided else ALONE  # whose ranks' results are summed
        self._computations: dict[tuple, Callable[..., Any]] = {}  # by class of rows and keywords
        self._kernels = None  # on torch, where the number of rows decides nothing
        if context.kernels:
            from nanovllm.layers.linear_kernels import LinearKernels

            self._kernels = LinearKernels(context)

    # --- loading ------------------------------------------------------------------------------------------------------

    def slots(self) -> dict[str, Slot]:
        group = self._context.group
        found = {} if self._shared else slots_of(self._spec["weight"], self.weight, group.rank, group.size)
        if self.bias is not None:
            found |= slots_of(self._spec["bias"], DenseWeight(self.bias), group.rank, group.size)
        return found

    def finish_loading(self) -> None:
        self._computations.clear()  # a format may have laid its weight out in other memory
        if isinstance(self.weight, DenseWeight):
            self.weight.finish_loading(keep=self._shared)
        else:
            self.weight.finish_loading()

    # --- computing ----------------------------------------------------------------------------------------------------

    @overload
    def __call__(self, x: Tensor, *, activation: Activation | None = None) -> Tensor: ...
    @overload
    def __call__(self, x: Residual, *, norm: RMSNorm, activation: Activation | None = None) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, *, add_to: Residual) -> Residual: ...

    def __call__(
        self,
        x: Tensor | Residual,  # [rows, in]
        *,
        norm: RMSNorm | None = None,
        activation: Activation | None = None,
        add_to: Residual | None = None,
    ) -> Tensor | Residual:
        """[rows, out], or half as many columns with an activation; `add_to` is added to in place and returned."""
        rows = 0
        if self._kernels is not None:
            rows = self._kernels.row_class(len(x) if isinstance(x, Residual) else x.shape[0])
        case = (rows, norm is None, activation, add_to is None)
        compute = self._computations.get(case)
        if compute is None:
            compute = self._computations[case] = self._compose(rows, norm is not None, activation, add_to is not None)
        return compute(x, norm, add_to)

    def _compose(self, rows: int, normed: bool, activation: Activation | None, adds: bool) -> Callable[..., Any]:
        """A function of (x, norm, add_to) for this number of rows and these keywords: what the chosen operation does
        not fuse is done around it. Decided once, because on a CPU a decode step makes some hundred such calls."""
        added = adds and self._group.rank == 0  # of the ranks whose results are summed, one adds the residual
        operation = self._select(rows, activation, added)
        # no function below refers to `self`, which keeps them: a cycle would keep the weights after the engine's close
        run, group = operation.run, self._group
        gate = silu_and_mul if self._kernels is None else self._kernels.gate(activation)
        if activation == "gelu" and self._kernels is None:
            from nanovllm.layers.gelu import gelu_and_mul as gate
        if operation.gate:
            run = partial(run, gated=True)

        def activated(y: Tensor) -> Tensor:
            return y if activation is None or operation.gate else gate(y)

        def product(x: Any, norm: Any) -> Tensor:
            return activated(run(x, norm=norm) if operation.norm else run(x.normed(norm)))

        def add(x: Tensor, norm: None, add_to: Any) -> Residual:
            if operation.splits:
                add_to.add_later(run(x))
            elif operation.add:
                add_to.rows = group.all_reduce(run(x, residual=add_to.rows))
            else:
                add_to.rows = group.all_reduce(add_to.rows + run(x) if added else run(x))
            return add_to

        if adds:
            return add
        if normed:
            return lambda x, norm, add_to: product(x, norm)
        return lambda x, norm, add_to: group.all_reduce(activated(run(x)))

    def _select(self, rows: int, activation: Activation | None, added: bool) -> Operation:
        if self._kernels is not None:
            whole, gated = self._group.size == 1, activation == "silu"  # which is what kernels know
            chosen = self._kernels.choose(self.weight, self.bias, rows=rows, gated=gated, added=added, whole=whole)
            if chosen is not None:
                kernel = chosen.kernel
                return Operation(chosen.run, kernel.norm, kernel.gate and gated, kernel.add and added, kernel.splits)
        # the format's own product on torch; some formats have one call for product and residual
        add = getattr(self.weight, "matmul_add", None)
        if added and add is not None:
            return Operation(partial(add, bias=self.bias), norm=False, gate=False, add=True)
        return Operation(partial(self.weight.matmul, bias=self.bias), norm=False, gate=False, add=False)


def silu_and_mul(gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
