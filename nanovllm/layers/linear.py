"""y = x W^T + b, computed in the way that is fastest for the device the weight lies on."""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices here without falling back to a loop."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


# OpenBLAS, behind torch on Arm, is up to a third faster at a few rows when the weight is the left factor
_WEIGHT_LEFT = platform.machine() in ("aarch64", "arm64")


class Linear:
    """A weight to be filled by the loader; `finish_loading` lays it out for the kernel that will read it."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None  # the weight in oneDNN's blocked layout, in place of `weight`

    def finish_loading(self, *, keep_weight: bool = False) -> None:
        """Pack a bfloat16 weight once for oneDNN on a CPU. `keep_weight` where an embedding shares it."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16 and cpu_has_bfloat16():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
            if not keep_weight:
                self.weight = torch.empty(0, dtype=self.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, in] -> [num_tokens, out]
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        if _WEIGHT_LEFT and 1 < x.shape[0] <= 64 and x.dtype == torch.float32 and x.device.type == "cpu":
            y = torch.mm(self.weight, x.t()).t().contiguous()
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in one pass where the kernel can."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
        if self.bias is None and x.shape[0] == 1:
            return torch.addmm(residual, x, self.weight.t())
        return residual + self(x)
