"""y = x W^T + b, computed in the way that is fastest for the device the weight lies on."""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.launch import usable
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual import Residual

THOUSANDS_OF_ROWS = 2048  # from here on the gate needs no memory for what goes into it, where a kernel serves


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

    def finish_loading(self, *, keep_weight: bool = False) -> None:
        """`keep_weight` where an embedding shares it."""

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, in] -> [num_tokens, out]
        return F.linear(x, self.weight, self.bias)

    def after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        return self(residual.normed(norm))

    def gated_after_norm(self, norm: RMSNorm, residual: Residual) -> Tensor:
        """silu(gate) * up, where the rows of the weight are those of gate, then those of up."""
        return silu_and_mul(self.after_norm(norm, residual))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in one pass where the kernel can; `residual` may be written over."""
        return residual + self(x)

    def split_k(self, x: Tensor) -> Tensor | None:  # [splits, num_tokens, out]
        """Partial sums of self(x), where adding them up in the next norm is faster than `add_to`; else None."""
        return None


class CpuLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device=device)
        self._packed: Tensor | None = None  # the weight in oneDNN's blocked layout, in place of `weight`

    def finish_loading(self, *, keep_weight: bool = False) -> None:
        """Pack a bfloat16 weight once for oneDNN."""
        if self.weight.dtype == torch.bfloat16 and cpu_has_bfloat16():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
            if not keep_weight:
                self.weight = torch.empty(0, dtype=self.weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        if _WEIGHT_LEFT and 1 < x.shape[0] <= 64 and x.dtype == torch.float32:
            y = torch.mm(self.weight, x.t()).t().contiguous()
            return y if self.bias is None else y + self.bias
        return super().__call__(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
        if self.bias is None and x.shape[0] == 1:
            return torch.addmm(residual, x, self.weight.t())
        return super().add_to(residual, x)


def make_linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,  # a row's result must not depend on how many others there are
) -> Linear:
    if device.type == "cpu":
        return CpuLinear(in_features, out_features, bias=bias, dtype=dtype, device=device)
    if not usable(device.type):
        return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
    from nanovllm.layers.cuda_linear import CudaLinear, DeterministicLinear

    kind = DeterministicLinear if deterministic else CudaLinear
    return kind(in_features, out_features, bias=bias, dtype=dtype, device=device)
