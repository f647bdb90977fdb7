"""Root-mean-square norm."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.stored import Slot, slots_of
from nanovllm.layers.context import BuildContext
from nanovllm.layers.spec import Weight
from nanovllm.weights.dense import DenseWeight

FEW_ROWS = 32


class RMSNorm:
    def __init__(self, spec: Weight, context: BuildContext, *, eps: float) -> None:
        self.spec = spec
        (self.size,) = spec.shard_shape(0, 1)
        dtype = context.dtype if spec.offset is None else torch.float32
        self.weight = torch.ones(self.size, dtype=dtype, device=context.device)
        self.fuses = dtype == context.dtype  # every kernel of a linear that fuses a norm may compute it
        self.eps = eps
        self._eps = torch.tensor(eps)
        self._mirrored: Tensor | None = None
        self._on_cpu = context.device.type == "cpu"
        self._in_float32 = context.dtype == torch.float32 and self._on_cpu
        self._pdl = context.pdl
        self._kernel: Callable[..., Tensor] | None = None
        if context.kernels:
            from nanovllm.kernels.elementwise.rms_norm import rms_norm

            self._kernel = rms_norm

    def slots(self) -> dict[str, Slot]:
        return slots_of(self.spec, DenseWeight(self.weight))

    def finish_loading(self) -> None:
        if self._on_cpu and not self._in_float32:
            self._mirrored = torch.cat([self.weight, torch.zeros_like(self.weight)])

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, size]
        if self._kernel is not None:
            return self._kernel(x, self.weight, self.eps, pdl=self._pdl)
        if self._mirrored is not None and x.shape[0] <= FEW_ROWS:
            # [x, -x] has mean 0 and variance mean(x^2): its layer norm, which is one kernel on a CPU, is x's RMS norm,
            # which would be eight
            twice = torch.cat((x, -x), dim=-1)
            return F.layer_norm(twice, (2 * self.size,), self._mirrored, None, self.eps)[:, : self.size]
        if self._in_float32 and x.shape[0] <= FEW_ROWS:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = torch.addcmul(self._eps, length, length, value=1 / self.size).rsqrt_()
            return (x * scale).mul_(self.weight)
        return F.rms_norm(x.to(self.weight.dtype), (self.size,), self.weight, self.eps).to(x.dtype)
