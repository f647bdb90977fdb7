"""Decode attention for few sequences against plain torch: output, writes to the cache, and the counters."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.attention.decode_workspace import DecodeWorkspace
from nanovllm.kernels.attention.small_batch import (
    MAX_PAIRS,
    MAX_PROGRAMS,
    SmallBatchConfig,
    small_batch_config,
    small_batch_decode,
    small_batch_serves,
)
from tests.kernels.decode_inputs import NUM_POSITIONS, Inputs, Sequences, check_decode
from tests.kernels.support import HALVES

EDGES = (1, 0, 15, 16, 17, 31, 32, 33, 34, 64, 65, 66, 0, 2)


@dataclass(frozen=True)
class Case(Sequences):
    reads_ahead: bool = True
    splits: int = 3
    held: int = 1
    together: bool = False


def make_workspace(case: Case) -> DecodeWorkspace:
    return case.workspace(len(case.lengths) * case.kv_heads * case.splits)


def check(case: Case, workspace: DecodeWorkspace | None = None, seed: int = 0, pdl: bool = False) -> None:
    workspace = workspace or make_workspace(case)

    def run(inputs: Inputs, out: Tensor) -> None:
        tables = inputs.blocks.index_select(0, inputs.rows)
        if pdl:
            torch.cuda.synchronize()  # the kernel reads before the previous kernel has ended
        small_batch_decode(
            inputs.qkv,
            inputs.cache,
            tables=tables,
            workspace=workspace,
            out=out,
            config=SmallBatchConfig(case.splits, case.held, case.together),
            window=case.window,
            pdl=pdl,
            **inputs.arguments(),
        )

    check_decode(case, seed, workspace, run)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_lengths_at_block_and_tile_edges(splits: int, heads: int) -> None:
    check(Case(lengths=EDGES, heads=heads, splits=splits))


@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_groups(group: int, held: int) -> None:
    """Programs with any number of tiles."""
    check(Case(lengths=(40, 0, 70, 130), heads=2 * group, kv_heads=2, held=held))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_dims(head_dim: int, group: int, dtype: torch.dtype) -> None:
    check(Case(lengths=(1, 35, 0, 70), heads=group, head_dim=head_dim, dtype=dtype, splits=2))


def test_sinks() -> None:
    check(Case(lengths=(1, 0, 17, 66), heads=5, norm=False, sinks=True))


@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 100])
def test_window(window: int, splits: int) -> None:
    check(Case(lengths=EDGES, window=window, splits=splits, sinks=splits == 3))


@pytest.mark.parametrize("block_size", [32, 48, 64])
def test_block_sizes(block_size: int) -> None:
    check(Case(lengths=(47, 48, 49, 100), block_size=block_size, splits=2))


def test_without_norm() -> None:
    check(Case(lengths=(5, 40), norm=False))


def test_a_batch_of_padding_writes_nothing() -> None:
    check(Case(lengths=(0, 0, 0)))


@pytest.mark.parametrize("length", [1, 33, NUM_POSITIONS])
def test_batch_of_one_in_many_splits(length: int) -> None:
    check(Case(lengths=(length,), heads=16, kv_heads=2, head_dim=128, splits=16))


def test_a_workspace_serves_many_calls() -> None:
    case = Case(lengths=(50, 0, 7, 33), heads=4, kv_heads=2, splits=4)
    workspace = make_workspace(case)
    for seed, lengths in enumerate([case.lengths, (1, 64, 0, 3), (0, 0, 0, 0), (130, 90, 90, 90)]):
        check(replace(case, lengths=lengths, splits=4 - seed), workspace, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_dependent_launch(dtype: torch.dtype) -> None:
    case = Case(lengths=(1, 700, 0, 300, 64), heads=8, kv_heads=2, head_dim=128, dtype=dtype, block_size=32, splits=8)
    check(case, pdl=True)
    check(replace(case, lengths=(4000,), splits=32), pdl=True)
    check(replace(case, window=128), pdl=True)
    check(replace(case, heads=4, lengths=(4000, 90, 31)), pdl=True)
    for heads in (2, 4, 6, 16):
        check(replace(case, heads=heads, splits=32, held=2, together=True), pdl=True)


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
    assert [small_batch_config(8 * batch, 2).splits for batch in (1, 2, 4, 8, 12, 16)] == [32, 32, 16, 16, 10, 8]
    assert [small_batch_config(8 * batch, 4).splits for batch in (1, 2, 4, 8, 12, 16)] == [32, 32, 16, 16, 10, 8]
    assert [small_batch_config(4 * batch, 8).splits for batch in (1, 2, 4, 8)] == [32, 32, 32, 16]
    assert [small_batch_config(8 * batch, 4, long=True).splits for batch in (1, 2, 4, 8)] == [128, 64, 32, 16]
    assert [small_batch_config(8 * batch, 4).together for batch in (1, 2, 3)] == [True, True, False]
    assert [small_batch_config(8 * batch, 8).together for batch in (1, 2, 3)] == [True, True, True]
    assert not small_batch_config(4, 8, window=128).together and not small_batch_config(4, 8, sinks=True).together
    assert all(1 <= small_batch_config(pairs, 2).splits * pairs <= MAX_PROGRAMS for pairs in range(1, MAX_PAIRS + 1))
