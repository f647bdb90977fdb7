"""Scattered writes change exactly the given elements."""

import pytest
import torch

from nanovllm.kernels.table.scatter import BLOCK, scatter, scatter_reference
from tests.kernels.support import DEVICE


@pytest.mark.parametrize("num_values", [1, 16, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_equals_assignment(num_values: int) -> None:
    generator = torch.Generator().manual_seed(num_values)
    table = torch.randint(-(2**31), 2**31 - 1, (2000,), generator=generator, dtype=torch.int32).to(DEVICE)
    indices = torch.randperm(2000, generator=generator)[:num_values].to(torch.int32).to(DEVICE)
    values = torch.randint(-(2**31), 2**31 - 1, (num_values,), generator=generator, dtype=torch.int32).to(DEVICE)
    expected = table.clone()
    scatter_reference(expected, indices, values)
    scatter(table, indices, values)
    assert torch.equal(table, expected)
