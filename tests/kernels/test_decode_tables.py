"""Gathered block tables and newest positions of a small batch equal plain indexing."""

import pytest
import torch

from nanovllm.kernels.attention.decode_tables import TILE, decode_tables, decode_tables_reference
from tests.kernels.support import DEVICE


@pytest.mark.parametrize("max_blocks", [1, 77, TILE, TILE + 1])
def test_equals_plain_indexing(max_blocks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(1000, (6, max_blocks), generator=generator, dtype=torch.int32).to(DEVICE)
    lengths = torch.tensor([0, 5, 1, 900, 32, 7], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([3, 0, 2, 5, 0], dtype=torch.int32, device=DEVICE)
    tables = torch.full((5, max_blocks), -7, dtype=torch.int32, device=DEVICE)
    positions = torch.full((7,), 99, dtype=torch.int32, device=DEVICE)
    decode_tables(rows, blocks, lengths, tables=tables, positions=positions[:5])
    expected_tables, expected_positions = decode_tables_reference(rows, blocks, lengths)
    assert torch.equal(tables, expected_tables)
    assert torch.equal(positions[:5], expected_positions)
    assert positions.tolist() == [899, -1, 0, 6, -1, 99, 99]
