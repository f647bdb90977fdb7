"""Weights in the model's own dtype."""

import math
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint.stored import Index, Part, Stored

# OpenBLAS, which torch uses on Arm, is up to a third faster for a few rows when the weight is the left factor
WEIGHT_LEFT_ROWS = 64 if platform.machine() in ("aarch64", "arm64") else 0


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices here without falling back to a loop."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class DenseWeight:
    format_name = "dense"

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self._packed: Tensor | None = None  # the weight in oneDNN's blocked layout

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        view = self.tensor[index]
        if view.numel():
            view.copy_(tensor.read(part))

    def finish_loading(self, *, keep: bool = False) -> None:
        """Pack a bfloat16 weight once for oneDNN. `keep`: an embedding still reads the tensor."""
        tensor = self.tensor
        if tensor.dim() == 2 and tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and cpu_has_bfloat16():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(tensor, None)
            if not keep:
                self.tensor = torch.empty(0, dtype=tensor.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.tensor)

    def dequantized(self, expert: int | None = None) -> Tensor:
        return self.tensor if expert is None else self.tensor[expert]

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        weight = self.tensor if expert is None else self.tensor[expert]
        if 1 < x.shape[0] <= WEIGHT_LEFT_ROWS and x.dtype == torch.float32 and expert is None:
            y = torch.mm(weight, x.t()).t().contiguous()
            return y if bias is None else y + bias
        return F.linear(x, weight, bias)

    def matmul_add(self, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + x W^T + bias, in one call where torch has one; `residual` may be overwritten."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, bias, "add")
        if bias is None and x.shape[0] == 1:
            return torch.addmm(residual, x, self.tensor.t())
        return residual + self.matmul(x, bias)

    def kernel_arguments(self) -> dict[str, Tensor]:
        return {"weight": self.tensor}


class DenseFormat:
    name = "dense"

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return math.prod(shape) * itemsize

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> DenseWeight:
        return DenseWeight(torch.empty(shape, dtype=dtype, device=device))
