"""Embeddings gathered from the request table equal plain indexing; padding gives zeros."""

import pytest
import torch

from nanovllm.kernels.table.embed import embed_tokens, embed_tokens_reference, gather_inputs
from tests.kernels.support import DEVICE

VOCAB_SIZE = 50


def make_table(num_rows: int, max_len: int) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (num_rows, max_len), dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "count"), [(64, 1), (80, 70), (1536, 5)])
def test_given_positions(hidden: int, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens = make_table(6, 33)
    embedding = torch.randn(VOCAB_SIZE, hidden, device=DEVICE).to(dtype)
    rows = torch.randint(1, 6, (count,), dtype=torch.int32, device=DEVICE)
    positions = torch.randint(33, (count,), dtype=torch.int32, device=DEVICE)
    rows[2::7], positions[2::7] = 0, -1
    out = torch.full((count, hidden), float("nan"), device=DEVICE).to(dtype)
    embed_tokens(tokens, rows, positions, embedding, out=out)
    assert torch.equal(out, embed_tokens_reference(tokens, rows, positions, embedding))
    assert not out[2::7].any()


@pytest.mark.parametrize("hidden", [96, 1024])
def test_the_newest_token_of_each_row(hidden: int) -> None:
    torch.manual_seed(1)
    tokens = make_table(5, 17)
    embedding = torch.randn(VOCAB_SIZE, hidden, device=DEVICE)
    length = torch.tensor([0, 1, 17, 4, 9], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([4, 2, 0, 1, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.full_like(rows, 99)
    out = torch.full((5, hidden), float("nan"), device=DEVICE)
    gather_inputs(tokens, length, rows, embedding, positions=positions, out=out)
    assert positions.tolist() == [8, 16, -1, 0, -1]
    for index, token in ((0, tokens[4, 8]), (1, tokens[2, 16]), (3, tokens[1, 0])):
        assert torch.equal(out[index], embedding[token.long()])
    assert not out[[2, 4]].any()


def test_rows_of_the_output_may_lie_apart() -> None:
    tokens = make_table(3, 8)
    embedding = torch.randn(VOCAB_SIZE, 48, device=DEVICE)
    wide = torch.zeros(2, 64, device=DEVICE)
    rows = torch.tensor([2, 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([3, 7], dtype=torch.int32, device=DEVICE)
    embed_tokens(tokens, rows, positions, embedding, out=wide[:, :48])
    assert torch.equal(wide[:, :48], embed_tokens_reference(tokens, rows, positions, embedding))
    assert not wide[:, 48:].any()
