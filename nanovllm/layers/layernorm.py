"""Root-mean-square norm."""

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.ones(size, dtype=dtype, device=device)
        self.shape = (size,)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:  # [..., size]
        return F.rms_norm(x, self.shape, self.weight, self.eps)
