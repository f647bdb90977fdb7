"""Paged decode attention against plain torch: output, writes to the cache, and counters reset to zero."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.attention.decode import paged_decode
from nanovllm.kernels.attention.decode_plan import DecodeConfig, decode_config, plan_decode, plan_decode_reference
from nanovllm.kernels.attention.decode_workspace import DecodeWorkspace
from tests.kernels.decode_inputs import Inputs, Sequences, check_decode
from tests.kernels.support import DEVICE

MAX_POSITION = 4096 if DEVICE == "cuda" else 128


@dataclass(frozen=True)
class Case(Sequences):
    dtype: torch.dtype = torch.float32
    programs: int = 3
    tile: int = 16
    splits: int = 0

    @property
    def config(self) -> DecodeConfig:
        programs = len(self.lengths) * self.kv_heads * self.splits or self.programs
        return DecodeConfig(self.tile, programs, num_warps=4, num_stages=2, splits=self.splits)


def make_workspace(case: Case) -> DecodeWorkspace:
    return case.workspace(case.config.num_programs)


def check(
    case: Case,
    workspace: DecodeWorkspace | None = None,
    seed: int = 0,
    pdl: bool = False,
    early: bool | None = None,
) -> None:
    workspace = workspace or make_workspace(case)

    def run(inputs: Inputs, out: Tensor) -> None:
        prefix = None
        if not case.splits:
            prefix = torch.full((len(case.lengths) + 1,), -7, dtype=torch.int32, device=DEVICE)
            plan_decode(inputs.positions, prefix, tile=case.tile, window=case.window, pdl=False)
        paged_decode(
            inputs.qkv,
            inputs.cache,
            inputs.scales,
            rows=inputs.rows,
            blocks=inputs.blocks,
            window=case.window,
            prefix=prefix,
            workspace=workspace,
            out=out,
            config=case.config,
            pdl=pdl,
            early=early,
            **inputs.arguments(),
        )

    check_decode(case, seed, workspace, run)


@pytest.mark.parametrize("window", [None, 1, 5, 17, 1000])
@pytest.mark.parametrize("tile", [16, 64])
def test_plan(tile: int, window: int | None) -> None:
    positions = torch.tensor([0, -1, 1, tile - 2, tile - 1, tile, -1, 3 * tile, 130], dtype=torch.int32, device=DEVICE)
    prefix = torch.full((10,), -7, dtype=torch.int32, device=DEVICE)
    plan_decode(positions, prefix, tile=tile, window=window, pdl=False)
    assert torch.equal(prefix, plan_decode_reference(positions, tile=tile, window=window))


def test_plan_of_a_large_batch() -> None:
    positions = torch.arange(-1, 599, dtype=torch.int32, device=DEVICE)
    prefix = torch.zeros(601, dtype=torch.int32, device=DEVICE)
    plan_decode(positions, prefix, tile=32, window=None, pdl=False)
    assert torch.equal(prefix, plan_decode_reference(positions, tile=32, window=None))


EDGES = (1, 0, 15, 16, 17, 31, 32, 33, 0, 2)


@pytest.mark.parametrize("programs", [1, 7, 100])
def test_lengths_at_block_and_tile_edges(programs: int) -> None:
    check(Case(lengths=EDGES, programs=programs))


@pytest.mark.parametrize(
    ("splits", "window", "cache_dtype"), [(0, None, None), (3, 12, None), (3, None, torch.float8_e4m3fn)]
)
def test_sinks(splits: int, window: int | None, cache_dtype: torch.dtype | None) -> None:
    shape = {"lengths": (1, 0, 16, 49), "heads": 3, "kv_heads": 1, "splits": splits, "window": window}
    dtype = torch.float32 if cache_dtype is None else torch.float16
    check(Case(**shape, dtype=dtype, cache_dtype=cache_dtype, sinks=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_lengths_at_block_and_tile_edges_in_fixed_splits(splits: int) -> None:
    check(Case(lengths=EDGES, splits=splits))


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("window", [1, 5, 17, 100])
def test_window(window: int, splits: int) -> None:
    check(Case(lengths=EDGES, window=window, programs=5, splits=splits))


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
def test_groups(group: int) -> None:
    check(Case(lengths=(20, 0, 37), heads=2 * group, kv_heads=2, programs=3))
    check(Case(lengths=(40, 0), heads=2 * group, kv_heads=2, splits=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    splits = 0 if head_dim in (64, 80) else 2
    check(Case(lengths=(1, 35, 0, 18), head_dim=head_dim, dtype=dtype, programs=4, splits=splits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_half_types_and_tiles(tile: int, dtype: torch.dtype) -> None:
    check(Case(lengths=(63, 64, 65, 3), heads=4, kv_heads=2, dtype=dtype, tile=tile, block_size=32, programs=5))


@pytest.mark.parametrize("block_size", [48, 64])
def test_block_sizes(block_size: int) -> None:
    check(Case(lengths=(47, 48, 49, 100), block_size=block_size, tile=32))


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("window", [None, 17])
def test_fp8_cache(window: int | None, head_dim: int) -> None:
    case = Case(
        lengths=(1, 16, 0, 33, 47), heads=4, kv_heads=2, head_dim=head_dim, window=window, dtype=torch.float16,
        cache_dtype=torch.float8_e4m3fn, programs=5,
    )  # fmt: skip
    check(case)
    check(replace(case, tile=32, norm=False, splits=2))
    check(replace(case, splits=1))
    check(replace(case, splits=1, tile=128, block_size=32))


def test_without_norm() -> None:
    check(Case(lengths=(5, 40), norm=False))


def test_one_long_sequence_among_short_ones() -> None:
    check(Case(lengths=(1, 1, MAX_POSITION, 1, 0, 2), heads=4, kv_heads=2, programs=7))


def test_a_batch_of_padding_writes_nothing() -> None:
    check(Case(lengths=(0, 0, 0)))


@pytest.mark.parametrize("programs", [1, 5, 64])
def test_batch_of_one(programs: int) -> None:
    check(Case(lengths=(100,), heads=4, kv_heads=2, programs=programs))


@pytest.mark.parametrize("length", [1, 33, MAX_POSITION])
def test_batch_of_one_in_many_splits(length: int) -> None:
    check(Case(lengths=(length,), heads=16, kv_heads=2, head_dim=128, splits=40))


def test_a_workspace_serves_many_calls() -> None:
    case = Case(lengths=(50, 0, 7, 33), splits=4)
    workspace = make_workspace(case)
    for seed, lengths in enumerate([case.lengths, (1, 64, 0, 3), (0, 0, 0, 0), (90, 90, 90, 90)]):
        check(replace(case, lengths=lengths, splits=4 * (seed % 2), programs=7), workspace, seed)


@pytest.mark.gpu
def test_dependent_launch() -> None:
    case = Case(lengths=(1, 700, 0, 300, 64), heads=8, kv_heads=2, dtype=torch.bfloat16, programs=132, tile=32)
    for splits in (0, 4):
        case = replace(case, splits=splits)
        check(case, pdl=True)
        check(case, pdl=True, early=False)
        check(replace(case, head_dim=80, cache_dtype=torch.float8_e4m3fn, dtype=torch.float16), pdl=True)


def test_configs_fit_the_machine() -> None:
    for batch in (1, 8, 32, 33, 256, 512):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
            config = decode_config(batch, kv_heads=8, head_dim=128, cache_dtype=dtype, num_sms=132, stream_k=False)
            assert config.tile & (config.tile - 1) == 0
            if config.splits:
                assert config.num_programs == 8 * batch * config.splits
            else:
                assert config.num_programs % 132 == 0


def test_bytes_in_tiles_whose_programs_fill_the_machine() -> None:
    def tile(batch: int, dtype: torch.dtype) -> int:
        return decode_config(batch, kv_heads=8, head_dim=128, cache_dtype=dtype, num_sms=132, stream_k=False).tile

    assert [tile(batch, torch.float8_e4m3fn) for batch in (33, 34, 49, 50, 99, 100, 128, 165, 166, 197, 198, 256)] == [
        64, 128, 128, 64, 64, 32, 32, 32, 64, 64, 32, 32
    ]  # fmt: skip
    assert [tile(batch, torch.bfloat16) for batch in (64, 128, 192, 256)] == [32, 32, 32, 32]


def test_splits_until_programs_fill_the_machine() -> None:
    def splits(batch: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return decode_config(batch, kv_heads=8, head_dim=128, cache_dtype=dtype, num_sms=132, stream_k=False).splits

    assert [splits(batch) for batch in (1, 4, 8, 16, 20, 24, 32, 41, 42, 256)] == [16, 8, 4, 4, 4, 3, 2, 2, 1, 1]
    assert [splits(batch, torch.float8_e4m3fn) for batch in (1, 8, 16, 17, 22, 23, 33, 34)] == [16, 4, 4, 3, 3, 2, 2, 1]
