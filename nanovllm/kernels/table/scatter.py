"""Write values at given indices of a table; used to apply a step's changes to the request table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch

BLOCK = 256


def scatter_reference(table: Tensor, indices: Tensor, values: Tensor) -> None:
    table[indices.long()] = values


@triton.jit(do_not_specialize=["num_values"])
def _scatter_kernel(table, indices, values, num_values, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < num_values
    index = tl.load(indices + at, mask=valid, other=0).to(tl.int64)
    tl.store(table + index, tl.load(values + at, mask=valid, other=0), mask=valid)


def scatter(table: Tensor, indices: Tensor, values: Tensor) -> None:
    """table[indices[i]] = values[i], all int32. No index may occur twice."""
    assert table.dtype == indices.dtype == values.dtype == torch.int32
    launch(_scatter_kernel, (cdiv(indices.numel(), BLOCK),), table, indices, values, indices.numel(), BLOCK=BLOCK)
