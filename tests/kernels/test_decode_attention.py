"""Paged decode attention against plain torch: output, what it writes to the cache, and the counters it leaves."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from nanovllm.kernels.decode_attention import paged_decode, paged_decode_reference
from nanovllm.kernels.decode_parts import DecodeWorkspace
from nanovllm.kernels.decode_plan import DecodeConfig, decode_config, plan_decode, plan_decode_reference
from tests.kernels.support import DEVICE

MAX_POSITION = 4096 if DEVICE == "cuda" else 128
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """One call's shape; `lengths` counts the newest token, 0 is padding."""

    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    norm: bool = True
    programs: int = 3
    tile: int = 16
    splits: int = 0

    @property
    def config(self) -> DecodeConfig:
        programs = len(self.lengths) * self.kv_heads * self.splits or self.programs
        return DecodeConfig(self.tile, programs, num_warps=4, num_stages=2, splits=self.splits)


class Inputs:
    """Random inputs of a case; every slot of the cache no sequence may read is NaN."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shuffle = random.Random(seed)

        def normal(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

        cache_dtype = case.cache_dtype or case.dtype
        fp8 = cache_dtype == torch.float8_e4m3fn
        batch = len(case.lengths)
        needed = [-(-length // case.block_size) for length in case.lengths]
        num_blocks = sum(needed) + 2
        numbers = list(range(1, num_blocks))
        shuffle.shuffle(numbers)
        self.rows = torch.tensor([0 if n == 0 else i + 1 for i, n in enumerate(case.lengths)], dtype=torch.int32)
        self.blocks = torch.full((batch + 1, max(needed) + 3), 10**6, dtype=torch.int32)
        self.blocks[0] = 0
        cache = torch.full((2, num_blocks, case.kv_heads, case.block_size, case.head_dim), float("nan"))
        scales = torch.full(cache.shape[:-1], float("nan"))
        for row, (length, count) in enumerate(zip(case.lengths, needed, strict=True), start=1):
            for i in range(count):
                block = numbers.pop()
                self.blocks[row, i] = block
                filled = max(0, min(case.block_size, length - 1 - i * case.block_size))
                cache[:, block, :, :filled] = torch.randn(2, case.kv_heads, filled, case.head_dim, generator=generator)
                scales[:, block, :, :filled] = torch.rand(2, case.kv_heads, filled, generator=generator) + 0.5
        self.cache = cache.to(cache_dtype).to(DEVICE)
        self.scales = scales.to(torch.bfloat16).to(DEVICE) if fp8 else None
        self.rows, self.blocks = self.rows.to(DEVICE), self.blocks.to(DEVICE)
        self.positions = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE) - 1
        self.qkv = normal(batch, case.heads + 2 * case.kv_heads, case.head_dim) * 2
        self.q_norm = 1 + normal(case.head_dim) / 4 if case.norm else None
        self.k_norm = 1 + normal(case.head_dim) / 4 if case.norm else None
        angles = torch.rand(MAX_POSITION, case.head_dim // 2, generator=generator) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE)

    def arguments(self, case: Case) -> dict:
        names = ("rows", "positions", "blocks", "q_norm", "k_norm", "cos_sin")
        return {name: getattr(self, name) for name in names} | {"eps": 1e-6, "window": case.window}


def make_workspace(case: Case) -> DecodeWorkspace:
    return DecodeWorkspace(
        max_batch=len(case.lengths) + 1,
        max_programs=case.config.num_programs,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        device=DEVICE,
    )


def check(case: Case, workspace: DecodeWorkspace | None = None, seed: int = 0, pdl: bool = False) -> None:
    inputs = Inputs(case, seed)
    workspace = workspace or make_workspace(case)
    batch = len(case.lengths)
    cache, scales = inputs.cache.clone(), None if inputs.scales is None else inputs.scales.clone()
    expected = paged_decode_reference(inputs.qkv, cache, scales, **inputs.arguments(case))

    prefix = None
    if not case.splits:
        prefix = torch.full((batch + 1,), -7, dtype=torch.int32, device=DEVICE)
        plan_decode(inputs.positions, prefix, tile=case.tile, window=case.window, pdl=False)
    out = torch.full_like(expected, 5.0)
    paged_decode(
        inputs.qkv,
        inputs.cache,
        inputs.scales,
        **inputs.arguments(case),
        prefix=prefix,
        workspace=workspace,
        out=out,
        config=case.config,
        pdl=pdl,
    )

    expected[inputs.positions < 0] = 5.0
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert not workspace.arrived.any()
    # The new slots agree up to the rounding of the norm; nothing else may change at all.
    written = torch.zeros(inputs.cache.shape[:-1], dtype=torch.bool)
    for i, length in enumerate(case.lengths):
        if length:
            block = int(inputs.blocks[i + 1, (length - 1) // case.block_size])
            written[:, block, :, (length - 1) % case.block_size] = True
    before = Inputs(case, seed)
    written = written.to(DEVICE)
    assert torch.equal(bits(inputs.cache)[~written], bits(before.cache)[~written])
    new, new_expected = dequantized(inputs.cache, inputs.scales)[written], dequantized(cache, scales)[written]
    rounding = 0.07 if inputs.scales is not None else tolerance
    torch.testing.assert_close(new, new_expected, rtol=rounding, atol=tolerance)
    if inputs.scales is not None and before.scales is not None and scales is not None:
        assert torch.equal(bits(inputs.scales)[~written], bits(before.scales)[~written])
        torch.testing.assert_close(inputs.scales[written], scales[written], rtol=1e-2, atol=0)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def dequantized(cache: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return cache.float() if scales is None else cache.float() * scales.float()[..., None]


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
        check(replace(case, head_dim=80, cache_dtype=torch.float8_e4m3fn, dtype=torch.float16), pdl=True)


def test_configs_fit_the_machine() -> None:
    for batch in (1, 8, 32, 33, 256, 512):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
            config = decode_config(batch, kv_heads=8, head_dim=128, cache_dtype=dtype, num_sms=132, balanced=False)
            assert config.tile & (config.tile - 1) == 0
            if config.splits:
                assert config.num_programs == 8 * batch * config.splits
            else:
                assert config.num_programs % 132 == 0


def test_bytes_in_smaller_tiles_where_there_are_most_programs() -> None:
    def tile(batch: int, dtype: torch.dtype) -> int:
        return decode_config(batch, kv_heads=8, head_dim=128, cache_dtype=dtype, num_sms=132, balanced=False).tile

    assert [tile(batch, torch.float8_e4m3fn) for batch in (64, 181, 182, 256)] == [64, 64, 32, 32]
    assert [tile(batch, torch.bfloat16) for batch in (64, 181, 182, 256)] == [32, 32, 32, 32]


def test_splits_until_programs_fill_the_machine() -> None:
    def splits(batch: int) -> int:
        config = decode_config(batch, kv_heads=8, head_dim=128, cache_dtype=torch.bfloat16, num_sms=132, balanced=False)
        return config.splits

    assert [splits(batch) for batch in (1, 4, 8, 16, 20, 24, 32, 41, 42, 256)] == [16, 8, 4, 4, 4, 3, 2, 2, 1, 1]
