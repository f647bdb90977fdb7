"""Look up token embeddings from the request table, at given positions or for each row's newest token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import cdiv, launch, next_power_of_2

TILE = 4096  # elements per program in `embed_tokens`


def embed_tokens_reference(tokens: Tensor, rows: Tensor, positions: Tensor, embedding: Tensor) -> Tensor:
    ids = tokens[rows.long(), positions.long().clamp(min=0)].long()
    return torch.where((positions >= 0)[:, None], embedding[ids], 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _embed_kernel(
    tokens,  # [R, max_len]
    length,  # [R], or None if positions are given
    rows,  # [T]
    positions,  # [T]
    embedding,  # [V, hidden]
    out,  # [T, hidden]
    num_tokens,
    hidden,
    tokens_stride,
    embedding_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # This kernel is the barrier between the previous step and this step's layers: it waits before it lets others
        # start, because later kernels read block tables and positions before their own wait. Positions that they read
        # this early were written by decode_tables.py, and are stored here again with the same values.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    valid = token < num_tokens
    row = tl.load(rows + token, mask=valid, other=0).to(tl.int64)
    if length is None:
        position = tl.load(positions + token, mask=valid, other=-1)
    else:
        position = tl.load(length + row, mask=valid, other=0) - 1
        tl.store(positions + token, position, mask=valid)
    known = position >= 0
    token_id = tl.load(tokens + row * tokens_stride + position, mask=known, other=0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (column < hidden)[None, :]
    x = tl.load(
        embedding + token_id[:, None] * embedding_stride + column[None, :], mask=known[:, None] & inside, other=0.0
    )
    tl.store(out + token.to(tl.int64)[:, None] * out_stride + column[None, :], x, mask=valid[:, None] & inside)


def _launch(
    tokens: Tensor,
    length: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    embedding: Tensor,
    out: Tensor,
    *,
    rows_each: int,
    pdl: bool,
) -> None:
    num_tokens, hidden = out.shape
    launch(
        _embed_kernel,
        (cdiv(num_tokens, rows_each),),
        tokens,
        length,
        rows,
        positions,
        embedding,
        out,
        num_tokens,
        hidden,
        tokens.stride(0),
        embedding.stride(0),
        out.stride(0),
        ROWS=rows_each,
        COLUMNS=next_power_of_2(hidden),
        PDL=pdl,
        num_warps=4,
        pdl=pdl,
    )


def gather_inputs(
    tokens: Tensor,  # [R, max_len] int32
    length: Tensor,  # [R] int32
    rows: Tensor,  # [B] int32
    embedding: Tensor,  # [V, hidden]
    *,
    positions: Tensor,  # [B] int32, written
    out: Tensor,  # [B, hidden], written
    pdl: bool = False,
) -> None:
    """Write the position and the embedding of each row's newest token; -1 and zeros for row 0, the padding row."""
    _launch(tokens, length, rows, positions, embedding, out, rows_each=1, pdl=pdl)


def embed_tokens(
    tokens: Tensor,  # [R, max_len] int32
    rows: Tensor,  # [T] int32
    positions: Tensor,  # [T] int32, -1 = padding
    embedding: Tensor,  # [V, hidden]
    *,
    out: Tensor,  # [T, hidden], written
) -> None:
    """Write the embeddings of the tokens at these positions of these rows; zeros for padding."""
    rows_each = max(1, TILE // next_power_of_2(out.shape[1]))
    _launch(tokens, None, rows, positions, embedding, out, rows_each=rows_each, pdl=False)
