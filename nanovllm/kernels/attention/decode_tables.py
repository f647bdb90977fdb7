"""Gather each row's block table and newest position before the layers of a decode step.

small_batch.py reads them before its programmatic-dependent-launch wait, so they must be written before the first layer.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch

TILE = 1024  # block numbers per program


def decode_tables_reference(rows: Tensor, blocks: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[rows], lengths[rows] - 1


@triton.jit(do_not_specialize=["max_blocks"])
def _decode_tables_kernel(rows, blocks, lengths, tables, positions, max_blocks, TILE: tl.constexpr):
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    block = tl.load(blocks + row * max_blocks + index, mask=index < max_blocks)
    tl.store(tables + seq.to(tl.int64) * max_blocks + index, block, mask=index < max_blocks)
    tl.store(positions + seq, tl.load(lengths + row) - 1)


def decode_tables(
    rows: Tensor,  # [n] int32
    blocks: Tensor,  # [R, max_blocks] int32
    lengths: Tensor,  # [R] int32
    *,
    tables: Tensor,  # [n, max_blocks] int32, written
    positions: Tensor,  # [n] int32, written; -1 for row 0, the padding row
) -> None:
    """Gather the block tables of these rows and the position of each row's newest token.

    Launched without `pdl`: it starts after the previous step has ended, and the next kernel's gdc_wait waits for it.
    """
    max_blocks = blocks.shape[1]
    assert blocks.is_contiguous() and tables.is_contiguous() and tables.shape == (len(rows), max_blocks)
    grid = (len(rows), cdiv(max_blocks, TILE))
    launch(_decode_tables_kernel, grid, rows, blocks, lengths, tables, positions, max_blocks, TILE=TILE, num_warps=4)
