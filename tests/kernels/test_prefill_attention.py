"""Paged prefill attention against plain torch, and bit for bit the same for every chunking of a prompt."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.kernels.attention.fp8 import quantize_reference
from nanovllm.kernels.attention.prefill import (
    PrefillConfig,
    paged_prefill,
    paged_prefill_reference,
    prefill_config,
    query_tiles,
)
from tests.kernels.support import DEVICE

FP8, HALF = torch.float8_e4m3fn, torch.float16
BRAIN = torch.bfloat16 if DEVICE == "cuda" else HALF  # the interpreter's dot products read bfloat16 as integers
SMALL = PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
UNTOUCHED = 7.0
LONG = "long prefill"  # instead of a config: the kernel for long prompts


@dataclass(frozen=True)
class Chunk:
    row: int
    start: int
    num_new: int


@dataclass(frozen=True)
class Model:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 32
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    window: int | None = None
    normed: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def default_config(self) -> PrefillConfig:
        return prefill_config(head_dim=self.head_dim, group=self.group, dtype=self.dtype, cache_dtype=self.cache_dtype)


@dataclass(frozen=True)
class Memory:
    """Sequences of given lengths in a cache that is NaN wherever nothing was stored, and their rotary tables."""

    cache: Tensor
    scales: Tensor | None
    blocks: Tensor
    cos_sin: Tensor
    q_norm: Tensor | None
    sinks: Tensor | None = None

    @staticmethod
    def of(model: Model, lengths: list[int], first_seen: list[int] | None = None) -> "Memory":
        max_blocks = -(-max(lengths) // model.block_size) + 1
        num_blocks = len(lengths) * max_blocks + 1
        blocks = torch.randperm(num_blocks - 1).view(len(lengths), max_blocks) + 1
        shape = (2, num_blocks, model.kv_heads, model.block_size, model.head_dim)
        cache = torch.full(shape, torch.nan).to(model.cache_dtype)
        scales = torch.full(shape[:4], torch.nan).bfloat16() if model.cache_dtype == FP8 else None
        for row, length in enumerate(lengths):
            positions = torch.arange(first_seen[row] if first_seen else 0, length)
            block, slot = blocks[row, positions // model.block_size], positions % model.block_size
            values = torch.randn(len(positions), 2, model.kv_heads, model.head_dim)
            if scales is not None:
                values, scale = quantize_reference(values)
                scales[:, block, :, slot] = scale
            cache[:, block, :, slot] = values.to(cache.dtype)
        blocks = torch.cat([torch.zeros(1, max_blocks, dtype=torch.int64), blocks]).int()  # row 0 is padding
        angles = torch.rand(max(lengths), model.head_dim // 2) * 6.3
        return Memory(
            cache.to(DEVICE),
            None if scales is None else scales.to(DEVICE),
            blocks.to(DEVICE),
            torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE),
            (torch.rand(model.head_dim) + 0.5).to(model.dtype).to(DEVICE) if model.normed else None,
            (3 * torch.randn(model.heads)).to(model.dtype).to(DEVICE) if model.has_sinks else None,
        )

    def without_nan(self) -> "Memory":
        """The cache for the reference, which multiplies with masked values."""
        cache = self.cache.float().nan_to_num().to(self.cache.dtype)
        return replace(self, cache=cache, scales=None if self.scales is None else self.scales.nan_to_num())


def attend(
    model: Model, memory: Memory, chunks: list[Chunk], qkv: Tensor, config: PrefillConfig | str | None
) -> Tensor:
    """One launch over all chunks, with their tokens one after the other; without a config, the reference."""
    num_new = np.array([chunk.num_new for chunk in chunks])
    out = torch.full((qkv.shape[0], model.heads * model.head_dim), UNTOUCHED, dtype=model.dtype, device=DEVICE)

    def column(values) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)

    arguments = {
        "q_norm": memory.q_norm,
        "eps": 1e-6,
        "cos_sin": memory.cos_sin,
        "chunk_rows": column([chunk.row for chunk in chunks]),
        "chunk_starts": column([chunk.start for chunk in chunks]),
        "chunk_first_tokens": column(np.cumsum(num_new) - num_new),
        "chunk_num_new": column(num_new),
        "blocks": memory.blocks,
        "num_heads": model.heads,
        "num_kv_heads": model.kv_heads,
        "window": model.window,
        "scale": 1.25 * model.head_dim**-0.5,  # not the usual one
        "out": out,
    }
    if config != LONG:
        arguments["sinks"] = memory.sinks
    if config is None:
        paged_prefill_reference(qkv, memory.cache, memory.scales, **arguments)
    else:
        starts = np.array([chunk.start for chunk in chunks])
        num_rows = config.block_m if isinstance(config, PrefillConfig) else 128
        tiles = column(query_tiles(starts, num_new, num_rows // model.group))
    if config == LONG:
        from nanovllm.kernels.attention.long_prefill import long_prefill

        long_prefill(qkv, memory.cache, **arguments, tiles=tiles)
    elif isinstance(config, PrefillConfig):
        paged_prefill(qkv, memory.cache, memory.scales, **arguments, tiles=tiles, config=config)
    return out


def random_qkv(model: Model, num_tokens: int) -> Tensor:
    shape = (num_tokens, model.heads + 2 * model.kv_heads, model.head_dim)
    return torch.randn(shape).to(model.dtype).to(DEVICE)


UNEVEN = [Chunk(1, 0, 33), Chunk(2, 40, 1), Chunk(3, 0, 200), Chunk(4, 127, 70), Chunk(5, 0, 1)]


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Model(normed=True), None),
        (Model(heads=2, kv_heads=2, head_dim=80, block_size=48, normed=True), SMALL),
        (Model(heads=5, kv_heads=1, head_dim=128, block_size=16, window=50), SMALL),
        (Model(heads=7, kv_heads=1, dtype=HALF, cache_dtype=HALF), None),
        (Model(heads=2, kv_heads=2, head_dim=96, dtype=HALF, cache_dtype=HALF, window=33), SMALL),
        (Model(heads=16, kv_heads=1, head_dim=128, dtype=BRAIN, cache_dtype=BRAIN, normed=True), None),
        (Model(heads=3, kv_heads=1, head_dim=256, dtype=BRAIN, cache_dtype=BRAIN), None),
        (Model(heads=2, kv_heads=1, head_dim=128, dtype=torch.bfloat16, cache_dtype=FP8), None),
        (Model(heads=5, kv_heads=1, head_dim=80, dtype=HALF, cache_dtype=FP8, window=20), SMALL),
        (Model(heads=2, kv_heads=1, head_dim=256, dtype=HALF, cache_dtype=FP8), None),
        (Model(heads=2, kv_heads=1, cache_dtype=FP8), SMALL),
        (Model(heads=3, kv_heads=1, has_sinks=True, dtype=HALF, cache_dtype=FP8, window=50), SMALL),
    ],
)
def test_against_reference(model, config):
    torch.manual_seed(0)
    memory = Memory.of(
        model,
        [chunk.start + chunk.num_new for chunk in UNEVEN],
        [0 if model.window is None else max(0, chunk.start - model.window + 1) for chunk in UNEVEN],
    )
    num_tokens = sum(chunk.num_new for chunk in UNEVEN)
    qkv = random_qkv(model, num_tokens + 3)
    out = attend(model, memory, UNEVEN, qkv, config or model.default_config)
    expected = attend(model, memory.without_nan(), UNEVEN, qkv, None)
    assert (out[num_tokens:] == UNTOUCHED).all()
    exact = model.cache_dtype == torch.float32
    tolerance = 1e-5 if exact else 1.6e-2 if model.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_padding_chunks_write_nothing():
    model = Model()
    memory = Memory.of(model, [20])
    chunks = [Chunk(0, -1, 1), Chunk(1, 0, 20), Chunk(0, -1, 1)]
    qkv = random_qkv(model, 22)
    out = attend(model, memory, chunks, qkv, model.default_config)
    assert (out[[0, 21]] == UNTOUCHED).all()
    torch.testing.assert_close(out, attend(model, memory, chunks, qkv, None))


def cut(row: int, lengths: list[int]) -> list[Chunk]:
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return [Chunk(row, start, length) for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize(
    "model",
    [
        Model(heads=4, kv_heads=2, head_dim=128, dtype=BRAIN, cache_dtype=BRAIN, normed=True),
        Model(heads=5, kv_heads=1, dtype=HALF, cache_dtype=HALF, window=37),
        Model(heads=3, kv_heads=1, dtype=BRAIN, cache_dtype=FP8),
        Model(heads=2, kv_heads=1),
    ],
)
def test_same_bits_however_a_prompt_is_cut(model):
    torch.manual_seed(1)
    length, config = (301, model.default_config) if DEVICE == "cuda" else (45, SMALL)
    memory = Memory.of(model, [length, 77, 130])
    qkv = random_qkv(model, length)

    def bits(cuts: list[int]) -> Tensor:
        return attend(model, memory, cut(1, cuts), qkv, config)

    whole = bits([length])
    assert torch.equal(bits([1, 33, 4, length - 38]), whole)
    assert torch.equal(bits([1] * length), whole)

    first, second = Chunk(2, 44, 33), Chunk(3, 80, 50)
    among = attend(
        model,
        memory,
        [first, *cut(1, [29, length - 29]), second],
        torch.cat([random_qkv(model, 33), qkv, random_qkv(model, 50)]),
        config,
    )
    assert torch.equal(among[33 : 33 + length], whole)
    # only the last token, as in a decode step
    last = attend(model, memory, [Chunk(1, length - 1, 1)], qkv[-1:].contiguous(), config)
    assert torch.equal(last[0], whole[-1])


def test_query_tiles_cover_every_token_once_and_come_longest_first():
    starts, num_new = np.array([0, 7, 100, 0, 0]), np.array([5, 0, 64, 1, 130])
    tiles = query_tiles(starts, num_new, 32)
    assert tiles.dtype == np.int32
    assert tiles.tolist() == [[2, 1], [2, 0], [4, 4], [4, 3], [4, 2], [4, 1], [4, 0], [0, 0], [3, 0]]
    none = np.array([], dtype=np.int64)
    assert query_tiles(none, none, 32).shape == (0, 2)


def test_query_tiles_of_the_last_tokens():
    starts, num_new = np.array([0, 7, 100, 0, 0]), np.array([5, 0, 64, 1, 130])
    assert query_tiles(starts, num_new, 32, np.array([1, 0, 1, 0, 2])).tolist() == [[2, 1], [4, 4], [0, 0]]
    assert query_tiles(starts, num_new, 32, np.array([0, 0, 33, 1, 3])).tolist() == [
        [2, 1],
        [2, 0],
        [4, 4],
        [4, 3],
        [3, 0],
    ]
    assert query_tiles(starts, num_new, 32, num_new).tolist() == query_tiles(starts, num_new, 32).tolist()
    assert query_tiles(starts, num_new, 32, np.zeros_like(num_new)).shape == (0, 2)
