"""Root-mean-square norm."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.launch import dependent_launch, usable

FEW_ROWS = 32


class RMSNorm:
    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.ones(size, dtype=dtype, device=device)
        self.size = size
        self.eps = eps
        self._eps = torch.tensor(eps)
        self._mirrored: Tensor | None = None
        self._in_float32 = dtype == torch.float32 and device.type == "cpu"
        self._kernel: Callable[..., Tensor] | None = None
        if usable(device.type):
            from nanovllm.kernels.elementwise.rms_norm import rms_norm

            self._kernel = rms_norm

    def finish_loading(self) -> None:
        if self.weight.device.type == "cpu" and not self._in_float32:
            self._mirrored = torch.cat([self.weight, torch.zeros_like(self.weight)])

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, size]
        if self._kernel is not None:
            return self._kernel(x, self.weight, self.eps, pdl=dependent_launch())
        if self._mirrored is not None and x.shape[0] <= FEW_ROWS:
            # [x, -x] has mean 0 and variance mean(x^2), so its layer norm, one kernel on a CPU, is x's RMS norm, eight
            twice = torch.cat((x, -x), dim=-1)
            return F.layer_norm(twice, (2 * self.size,), self._mirrored, None, self.eps)[:, : self.size]
        if self._in_float32 and x.shape[0] <= FEW_ROWS:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = torch.addcmul(self._eps, length, length, value=1 / self.size).rsqrt_()
            return (x * scale).mul_(self.weight)
        return F.rms_norm(x, (self.size,), self.weight, self.eps)

    def after_adding(self, x: Tensor, partial_sums: Tensor) -> Tensor:  # [num_tokens, size], [splits, num_tokens, size]
        """Add a split-K linear's partial sums to x in place, and return the norm of the result."""
        from nanovllm.kernels.elementwise.rms_norm import add_rms_norm

        return add_rms_norm(x, partial_sums, self.weight, self.eps, pdl=dependent_launch())
