"""The interface of weight formats: how the weights of linears and experts are kept in memory and multiplied.

A format is a small class. Dense weights in the model's dtype are one of them. The loader hands over tensors as the file
holds them; only the format knows how they are stored.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Index, Part, Stored


class StoredWeight(Protocol):
    """One weight in memory: [out, in], or [experts, out, in]."""

    format_name: str  # by which kernels/select.py knows its kernels

    @property
    def shape(self) -> tuple[int, ...]: ...

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        """Store a checkpoint tensor, or the `part` of it that this rank holds, at `index`."""
        ...

    def finish_loading(self) -> None:
        """Called once after the last `load`: lay the weight out for the kernels that read it."""
        ...

    def dequantized(self, expert: int | None = None) -> Tensor:
        """The weight, or that of one expert, as a dense tensor of the model's dtype or float32."""
        ...

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        """x W^T + bias on torch alone: [rows, in] -> [rows, out]. The definition that kernels are tested against."""
        ...

    def kernel_arguments(self) -> dict[str, Any]:
        """What a kernel for this format reads: "weight" and, where weights are scaled, "scale". Packed weights that
        kernels read are one `PackedWords`."""
        ...


class WeightFormat(Protocol):
    name: str

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Memory of a weight of this shape; `itemsize` is that of the model's dtype."""
        ...

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> StoredWeight: ...
