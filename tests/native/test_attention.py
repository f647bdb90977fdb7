"""Attention in C against torch: KV caches of every type, blocks in any order, windows, several segments."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.native.build import library
from nanovllm.native.weights import DENSE, pointer

LIBRARY = library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no native library on this machine")
SEGMENT, BLOCK, HEAD_DIM, KV_HEADS = 128, 16, 32, 2


class Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "window")),
        ("scale", ctypes.c_float),
        ("queries", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("positions", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_offset", ctypes.c_int64),
        ("first_segments", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
    )


def attend(
    queries: Tensor,  # [token, head, head_dim]
    keys: Tensor,  # [block, kv_head, position, head_dim]
    values: Tensor,
    table: Tensor,
    length: int,
    window: int = 0,
    together: int = 1,
    sinks: Tensor | None = None,  # [head]
    gap: int = 0,  # numbers between two heads of `queries`
) -> Tensor:
    """The last tokens of a sequence."""
    assert LIBRARY is not None
    keys = keys.transpose(2, 3).contiguous()  # as C has them: the same number of a block's positions together
    num_tokens, num_heads, _ = queries.shape
    apart = torch.nn.functional.pad(queries, (0, gap), value=float("nan"))
    positions = torch.arange(length - num_tokens, length, dtype=torch.int32)
    segments = positions // SEGMENT + 1
    first = (segments.cumsum(0) - segments).int()
    partial = torch.empty(int(segments.sum()), num_heads, HEAD_DIM + LIBRARY.rows_of_strip())
    largest = torch.empty(int(segments.sum()), num_heads)
    tables = (ctypes.c_void_p * num_tokens)(*[table.data_ptr()] * num_tokens)
    arguments = Attention(
        *(num_heads, KV_HEADS, HEAD_DIM, BLOCK, window, HEAD_DIM**-0.5),
        *(pointer(apart), apart.stride(0), apart.stride(1), pointer(keys), pointer(values), DENSE[keys.dtype]),
        *(pointer(positions), ctypes.addressof(tables), 0, pointer(first), pointer(partial), pointer(largest)),
    )
    out = torch.empty_like(queries)
    token = 0
    while token < num_tokens:
        count = min(together, LIBRARY.tokens_together(ctypes.byref(arguments), token, num_tokens))
        for segment in range(int(segments[token])):
            for head in range(KV_HEADS):
                LIBRARY.attend_segment(ctypes.byref(arguments), token, count, head, segment)
        token += count
    for token in range(num_tokens):
        LIBRARY.attend_merge(
            ctypes.byref(arguments), token, sinks if sinks is None else pointer(sinks), pointer(out[token])
        )
    return out


@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize(("group", "window"), [(1, 0), (3, 0), (4, 0), (1, 3), (3, 17), (4, 100)])
def test_tokens_that_are_computed_together_have_the_same_bits(dtype: torch.dtype, group: int, window: int) -> None:
    generator = torch.Generator().manual_seed(group)
    length, num_tokens = 150, 45  # through the end of a segment, from and to the middle of 8 tokens
    keys, values = (torch.randn(10, KV_HEADS, BLOCK, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
    queries = torch.randn(num_tokens, group * KV_HEADS, HEAD_DIM, generator=generator)
    table = torch.arange(10, dtype=torch.int32)
    alone = attend(queries, keys, values, table, length, window)
    for together in (2, 3, 8):
        assert torch.equal(attend(queries, keys, values, table, length, window, together), alone)
    for token in (0, 22, 44):  # one whose neighbours are not there at all
        end = length - num_tokens + token + 1
        only = attend(queries[token : token + 1], keys, values, table, end, window)
        assert torch.equal(only[0], alone[token])


@settings(max_examples=min(25, settings().max_examples))
@given(
    length=st.one_of(st.integers(1, 40), st.integers(250, 530)),
    window=st.sampled_from([0, 1, 7, 100, 300]),
    group=st.integers(1, 3),
    seed=st.integers(0, 1000),
    has_sinks=st.booleans(),
)
@pytest.mark.parametrize("dtype", DENSE)
def test_attention(dtype: torch.dtype, length: int, window: int, group: int, seed: int, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-length // BLOCK)
    shape = (num_blocks + 2, KV_HEADS, BLOCK, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(group * KV_HEADS, HEAD_DIM, generator=generator)
    table = torch.randperm(num_blocks + 2, generator=generator)[:num_blocks].int()
    seen = slice(max(length - window, 0) if window else 0, length)
    # [kv_head, position, head_dim] of the positions that are seen, for each query head
    k, v = (
        kept[table.long()].transpose(0, 1).flatten(1, 2)[:, seen].double().repeat_interleave(group, dim=0)
        for kept in (keys, values)
    )
    scores = torch.einsum("hd,hpd->hp", query.double(), k) * HEAD_DIM**-0.5
    sinks = torch.randn(group * KV_HEADS, generator=generator) * 4 if has_sinks else None
    column = torch.full_like(scores[:, :1], float("-inf")) if sinks is None else sinks.double()[:, None]
    weights = torch.cat([scores, column], dim=1).softmax(dim=-1)[:, :-1]
    expected = torch.einsum("hp,hpd->hd", weights, v)
    out = attend(query[None], keys, values, table, length, window, sinks=sinks, gap=16 * has_sinks)[0]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
