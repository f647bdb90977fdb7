"""Weights of different formats, one below the other: a fused linear whose parts a checkpoint stores differently."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.checkpoint.stored import Index, Part, Stored
from nanovllm.weights.format import StoredWeight, WeightFormat


class StackedWeight:
    format_name = "stacked"

    def __init__(self, weights: list[StoredWeight]) -> None:
        self.weights = weights
        rows = sum(weight.shape[-2] for weight in weights)
        self.shape = (*weights[0].shape[:-2], rows, weights[0].shape[-1])

    def load(self, index: Index, tensor: Stored, part: Part) -> None:
        *expert, rows = index
        assert isinstance(rows, slice)
        first = 0
        for weight in self.weights:
            if first <= rows.start < first + weight.shape[-2]:
                weight.load((*expert, slice(rows.start - first, rows.stop - first)), tensor, part)
            first += weight.shape[-2]

    def finish_loading(self) -> None:
        for weight in self.weights:
            weight.finish_loading()

    def dequantized(self, expert: int | None = None) -> Tensor:
        return torch.cat([weight.dequantized(expert) for weight in self.weights], dim=-2)

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        y = torch.cat([weight.matmul(x, expert=expert) for weight in self.weights], dim=-1)
        return y if bias is None else y + bias

    def kernel_arguments(self) -> dict[str, Tensor]:
        raise NotImplementedError("the parts have different formats: no kernel computes them together")


@dataclass
class StackedFormat:
    formats: tuple[WeightFormat, ...]
    rows: tuple[int, ...]  # of each part
    name: str = "stacked"

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        parts = zip(self.formats, self.rows, strict=True)
        return sum(form.num_bytes((*shape[:-2], rows, shape[-1]), itemsize) for form, rows in parts)

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> StackedWeight:
        parts = zip(self.formats, self.rows, strict=True)
        shapes = [(form, (*shape[:-2], rows, shape[-1])) for form, rows in parts]
        return StackedWeight([form.empty(part, dtype=dtype, device=device) for form, part in shapes])
