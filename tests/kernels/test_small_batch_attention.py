"""Decode attention for a few sequences against plain torch: output, what it writes to the cache, and the counters."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from nanovllm.kernels.decode_attention import paged_decode_reference
from nanovllm.kernels.decode_parts import DecodeWorkspace
from nanovllm.kernels.small_batch_attention import (
    MAX_PAIRS,
    MAX_PROGRAMS,
    small_batch_decode,
    small_batch_serves,
    small_batch_splits,
)
from tests.kernels.support import DEVICE

MAX_POSITION = 4096 if DEVICE == "cuda" else 256
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
EDGES = (1, 0, 15, 16, 17, 31, 32, 33, 34, 64, 65, 66, 0, 2)


@dataclass(frozen=True)
class Case:
    """One call's shape; `lengths` counts the newest token, 0 is padding."""

    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    norm: bool = True
    splits: int = 3


class Inputs:
    """Random inputs of a case; what lies in the cache past a sequence's end is NaN, wherever its table leads."""

    def __init__(self, case: Case, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype).to(DEVICE)

        batch = len(case.lengths)
        needed = [-(-length // case.block_size) for length in case.lengths]
        num_blocks = sum(needed) + 2
        numbers = list(range(1, num_blocks))
        random.Random(seed).shuffle(numbers)
        self.blocks = torch.zeros(batch + 1, max(needed) + 1, dtype=torch.int32)
        cache = torch.full((2, num_blocks, case.kv_heads, case.block_size, case.head_dim), float("nan"))
        for row, (length, count) in enumerate(zip(case.lengths, needed, strict=True), start=1):
            self.blocks[row, count:] = numbers[0]  # somebody else's
            for i in range(count):
                block = numbers.pop()
                self.blocks[row, i] = block
                filled = max(0, min(case.block_size, length - 1 - i * case.block_size))
                cache[:, block, :, :filled] = torch.randn(2, case.kv_heads, filled, case.head_dim, generator=generator)
        self.cache = cache.to(case.dtype).to(DEVICE)
        rows = [0 if length == 0 else i + 1 for i, length in enumerate(case.lengths)]
        self.rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        self.blocks = self.blocks.to(DEVICE)
        self.positions = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE) - 1
        self.qkv = normal(batch, case.heads + 2 * case.kv_heads, case.head_dim) * 2
        self.q_norm = 1 + normal(case.head_dim) / 4 if case.norm else None
        self.k_norm = 1 + normal(case.head_dim) / 4 if case.norm else None
        angles = torch.rand(MAX_POSITION, case.head_dim // 2, generator=generator) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE)

    def arguments(self) -> dict:
        names = ("positions", "q_norm", "k_norm", "cos_sin")
        return {name: getattr(self, name) for name in names} | {"eps": 1e-6}


def make_workspace(case: Case) -> DecodeWorkspace:
    return DecodeWorkspace(
        max_batch=len(case.lengths) + 1,
        max_programs=len(case.lengths) * case.kv_heads * case.splits,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        device=DEVICE,
    )


def check(case: Case, workspace: DecodeWorkspace | None = None, seed: int = 0, pdl: bool = False) -> None:
    inputs, before = Inputs(case, seed), Inputs(case, seed)
    workspace = workspace or make_workspace(case)
    expected_cache = inputs.cache.clone()
    expected = paged_decode_reference(
        inputs.qkv, expected_cache, None, rows=inputs.rows, blocks=inputs.blocks, window=None, **inputs.arguments()
    )
    expected[inputs.positions < 0] = 5.0
    out = torch.full_like(expected, 5.0)
    tables = inputs.blocks.index_select(0, inputs.rows)
    if pdl:
        torch.cuda.synchronize()  # the kernel reads ahead of the one before
    small_batch_decode(
        inputs.qkv,
        inputs.cache,
        tables=tables,
        workspace=workspace,
        out=out,
        splits=case.splits,
        pdl=pdl,
        **inputs.arguments(),
    )

    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert not workspace.arrived.any()
    # the new slots agree up to the rounding of the norm; nothing else may change at all
    written = torch.zeros(inputs.cache.shape[:-1], dtype=torch.bool)
    for i, length in enumerate(case.lengths):
        if length:
            block = int(inputs.blocks[i + 1, (length - 1) // case.block_size])
            written[:, block, :, (length - 1) % case.block_size] = True
    written = written.to(DEVICE)
    assert torch.equal(inputs.cache.view(torch.int16)[~written], before.cache.view(torch.int16)[~written])
    torch.testing.assert_close(inputs.cache[written], expected_cache[written], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("splits", "heads"), [(1, 2), (2, 4), (5, 2), (5, 4)])
def test_lengths_at_block_and_tile_edges(splits: int, heads: int) -> None:
    check(Case(lengths=EDGES, heads=heads, splits=splits))


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_groups(group: int) -> None:
    """One tile held or two, and programs with any number of tiles."""
    check(Case(lengths=(40, 0, 70, 130), heads=2 * group, kv_heads=2))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_dims(head_dim: int, group: int, dtype: torch.dtype) -> None:
    check(Case(lengths=(1, 35, 0, 70), heads=group, head_dim=head_dim, dtype=dtype, splits=2))


@pytest.mark.parametrize("block_size", [32, 48, 64])
def test_block_sizes(block_size: int) -> None:
    check(Case(lengths=(47, 48, 49, 100), block_size=block_size, splits=2))


def test_without_norm() -> None:
    check(Case(lengths=(5, 40), norm=False))


def test_a_batch_of_padding_writes_nothing() -> None:
    check(Case(lengths=(0, 0, 0)))


@pytest.mark.parametrize("length", [1, 33, MAX_POSITION])
def test_batch_of_one_in_many_splits(length: int) -> None:
    check(Case(lengths=(length,), heads=16, kv_heads=2, head_dim=128, splits=16))


def test_a_workspace_serves_many_calls() -> None:
    case = Case(lengths=(50, 0, 7, 33), heads=4, kv_heads=2, splits=4)
    workspace = make_workspace(case)
    for seed, lengths in enumerate([case.lengths, (1, 64, 0, 3), (0, 0, 0, 0), (130, 90, 90, 90)]):
        check(replace(case, lengths=lengths, splits=4 - seed), workspace, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dependent_launch(dtype: torch.dtype) -> None:
    case = Case(lengths=(1, 700, 0, 300, 64), heads=8, kv_heads=2, head_dim=128, dtype=dtype, block_size=32, splits=8)
    check(case, pdl=True)
    check(replace(case, lengths=(4000,), splits=32), pdl=True)
    check(replace(case, heads=4, lengths=(4000, 90, 31)), pdl=True)


def test_what_it_serves_and_how_it_is_cut() -> None:
    for head_dim, dtype in [(64, torch.bfloat16), (128, torch.float16)]:
        assert small_batch_serves(head_dim=head_dim, group=8, cache_dtype=dtype)
        assert not small_batch_serves(head_dim=head_dim, group=9, cache_dtype=dtype)
    for head_dim, dtype in [
        (80, torch.bfloat16),
        (128, torch.float8_e4m3fn),
        (128, torch.float32),
        (256, torch.float16),
    ]:
        assert not small_batch_serves(head_dim=head_dim, group=1, cache_dtype=dtype)
    assert [small_batch_splits(8 * batch) for batch in (1, 2, 4, 8, 12, 16)] == [32, 32, 16, 16, 10, 8]
    assert all(1 <= small_batch_splits(pairs) * pairs <= MAX_PROGRAMS for pairs in range(1, MAX_PAIRS + 1))
