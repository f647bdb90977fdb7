"""Every attention backend equals plain attention, with sequences scattered over the blocks of the cache."""

import sys
import types
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nanovllm.attention.backend import BatchGeometry, CacheShape, LayerAttention, LayerCache
from nanovllm.attention.interface import AttentionBackend, Lengths
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.attention.triton import TritonBackend, padded
from nanovllm.kernels.attention.small_batch import SmallBatchConfig
from nanovllm.kernels.features import dependent_launch
from tests.kernels.support import DEVICE

PDL = dependent_launch()
BACKENDS = {
    "sdpa": SdpaBackend,
    "triton": partial(TritonBackend, max_num_seqs=8, pdl=PDL),
    "triton deterministic": partial(TritonBackend, max_num_seqs=8, deterministic=True, pdl=PDL),
}
HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 16, 16, 64
SCALE = 0.3
POISONED = NUM_BLOCKS - 1  # a block of NaN

# (tokens already computed, new tokens) of each sequence; decodes first
STEPS = {
    "one decode": [(40, 1)],
    "decodes": [(0, 1), (15, 1), (16, 1), (17, 1), (47, 1)],
    "decodes of very different lengths": [(3, 1), (200, 1), (30, 1), (120, 1), (15, 1)],
    "whole prompts": [(0, 33), (0, 2), (0, 16)],
    "chunks": [(16, 7), (5, 20), (33, 2)],
    "mixed": [(9, 1), (100, 1), (0, 21), (17, 30), (63, 2)],
}


def cache_shape(heads: tuple[int, int], window: int | None) -> CacheShape:
    return CacheShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        windows=(window,),
        dtype=torch.float32,
        cache_dtype=torch.float32,
        device=torch.device(DEVICE),
    )


def unrotated(head_dim: int) -> torch.Tensor:
    return torch.cat([torch.ones(512, head_dim // 2), torch.zeros(512, head_dim // 2)], dim=1).to(DEVICE)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of [new, heads, dim] queries over [length, kv_heads, dim] keys, in float64, one query at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        position = len(k) - len(q) + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys, values = (x[first : position + 1, head // group].double() for x in (k, v))
            weights = (keys @ q[i, head].double() * SCALE).exp()
            sink = 0.0 if sinks is None else sinks[head].double().exp()
            out[i, head] = weights @ values / (weights.sum() + sink)
    return out.reshape(len(q), -1).float()


def geometry_of(parts: list[tuple[int, int]], block_tables: np.ndarray, window: int | None) -> BatchGeometry:
    starts, num_new = np.array(parts).T
    first_tokens = np.cumsum(num_new) - num_new
    token_seqs = np.repeat(np.arange(len(parts)), num_new)
    positions = starts[token_seqs] + np.arange(len(token_seqs)) - first_tokens[token_seqs]
    return BatchGeometry(
        num_decodes=next((i for i, (start, new) in enumerate(parts) if new > 1), len(parts)),
        rows=np.arange(len(parts)),
        starts=starts,
        num_new=num_new,
        num_sampled=np.ones_like(num_new),
        first_tokens=first_tokens,
        token_seqs=token_seqs,
        positions=positions,
        block_tables={window: block_tables},
        device_rows=as_int32(token_seqs),
        device_positions=as_int32(positions),
        device_blocks={window: as_int32(block_tables)},
    )


def as_int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(DEVICE)


def block_tables_of(parts: list[tuple[int, int]]) -> np.ndarray:
    """Block tables in random order without shared blocks: [seqs, blocks of the longest]; unused entries are block 0."""
    order = iter(torch.randperm(POISONED, generator=torch.Generator().manual_seed(3)).tolist())
    sizes = [-(-(start + new) // BLOCK_SIZE) for start, new in parts]
    tables = np.zeros((len(parts), max(sizes)), dtype=np.int64)
    for table, size in zip(tables, sizes, strict=True):
        table[:size] = [next(order) for _ in range(size)]
    return tables


HEADS, WINDOWS = [(3, 3), (6, 2), (7, 1)], [None, 5, 20, 1000]
CASES = [("sdpa", heads, window) for heads in HEADS for window in WINDOWS]
WITH_SINKS = (4, 2)
CASES += [("sdpa", WITH_SINKS, None), ("sdpa", WITH_SINKS, 20), ("triton", WITH_SINKS, None)]
# the kernels have their own tests, and the interpreter is slow
CASES += [(name, heads, window) for name in list(BACKENDS)[1:] for heads, window in [((6, 2), None), ((7, 1), 20)]]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("backend_name", "heads", "window"), CASES, ids=str)
@torch.inference_mode()
def test_equals_plain_attention(backend_name: str, heads: tuple[int, int], window: int | None, name: str) -> None:
    parts = STEPS[name]
    num_heads, num_kv_heads = heads
    sinks = torch.linspace(-1, 3, num_heads) if heads == WITH_SINKS else None
    backend: AttentionBackend = BACKENDS[backend_name](cache_shape(heads, window), [unrotated(HEAD_DIM)])
    (layer,) = backend.make_cache({window: NUM_BLOCKS})
    cache = layer.kv
    cache[:, POISONED] = float("nan")
    cache[:, :POISONED] = 1e4  # old values of other requests, which must not be read
    tables = block_tables_of(parts)
    generator = torch.Generator().manual_seed(0)
    news, expected = [], []
    for (start, new), table in zip(parts, tables, strict=True):
        q = torch.randn(new, num_heads, HEAD_DIM, generator=generator)
        k, v = torch.randn(2, start + new, num_kv_heads, HEAD_DIM, generator=generator)
        first_block = 0 if window is None else max(start - window + 1, 0) // BLOCK_SIZE
        table[:first_block] = POISONED  # what has left the window belongs to others by now
        for position in range(first_block * BLOCK_SIZE, start):
            block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            cache[0, block, :, offset], cache[1, block, :, offset] = k[position], v[position]
        news.append(torch.cat([q, k[start:], v[start:]], dim=1))
        expected.append(plain_attention(q, k, v, window, sinks))
    before = cache.clone()
    geometry = geometry_of(parts, tables, window)
    how = LayerAttention(scale=SCALE, window=window, sinks=None if sinks is None else sinks.to(DEVICE))
    out = backend.forward(torch.cat(news).to(DEVICE), how, layer, backend.prepare(geometry, as_int32))
    torch.testing.assert_close(out.cpu(), torch.cat(expected), atol=1e-5, rtol=1e-5)

    stored = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for (start, new), table in zip(parts, tables, strict=True):
        positions = np.arange(start, start + new)
        stored[table[positions // BLOCK_SIZE], positions % BLOCK_SIZE] = True
        if BACKENDS[backend_name] is SdpaBackend and start <= positions[-1] // BLOCK_SIZE * BLOCK_SIZE:
            erased = cache[:, table[-(-(start + new) // BLOCK_SIZE) - 1], :, (start + new - 1) % BLOCK_SIZE + 1 :]
            assert (erased == 0).all(), "old values are left in a block that a sequence begins"
            erased.fill_(1e4)
    changed = (cache != before)[:, :POISONED].any(dim=-1)  # [k|v, block, kv_head, position]
    assert torch.equal(changed, stored[None, :POISONED, None].expand_as(changed)), "a slot of someone else was written"


@pytest.mark.parametrize(("heads", "window"), [((6, 2), None), ((6, 2), 20), (WITH_SINKS, None)], ids=str)
@torch.inference_mode()
def test_nan_that_others_left_in_a_block_is_not_read(heads: tuple[int, int], window: int | None) -> None:
    """Sequences of different lengths, from their prompts on, in blocks that were full of NaN."""
    backend, (num_heads, num_kv_heads) = SdpaBackend(cache_shape(heads, window), [unrotated(HEAD_DIM)]), heads
    sinks = torch.linspace(-1, 3, num_heads).to(DEVICE) if heads == WITH_SINKS else None
    how = LayerAttention(scale=SCALE, window=window, sinks=sinks)
    (layer,) = backend.make_cache({window: NUM_BLOCKS})
    layer.kv.fill_(float("nan"))
    prompts, num_decoded = [1, 15, 16, 40, 90], 20
    tables = block_tables_of([(length, num_decoded) for length in prompts])
    generator = torch.Generator().manual_seed(0)
    shape = (num_heads + 2 * num_kv_heads, HEAD_DIM)
    qkvs = [torch.randn(length + num_decoded, *shape, generator=generator) for length in prompts]
    # all prompts in two chunks, the first of which ends within a block, then all sequences together
    steps = [[(0, -(-length // 2)) for length in prompts]]
    steps += [[(-(-length // 2), length // 2 + 1) for length in prompts]]
    steps += [[(length + i, 1) for length in prompts] for i in range(1, num_decoded)]
    for parts in steps:
        new = torch.cat([qkv[start : start + num] for qkv, (start, num) in zip(qkvs, parts, strict=True)])
        step = backend.prepare(geometry_of(parts, tables, window), as_int32)
        out = backend.forward(new.to(DEVICE), how, layer, step).cpu()
    for qkv, last in zip(qkvs, out, strict=True):
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        expected = plain_attention(q[-1:], k, v, window, sinks)
        torch.testing.assert_close(last[None], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", STEPS)
@torch.inference_mode()
def test_a_step_of_sampled_tokens(name: str, is_padded: bool) -> None:
    """The last token of every other sequence is sampled: it has the same result, and all keys and values are stored."""
    parts = STEPS[name]
    backend = TritonBackend(cache_shape((6, 2), None), [unrotated(HEAD_DIM)], max_num_seqs=8, pdl=PDL)
    (layer,) = backend.make_cache({None: NUM_BLOCKS})
    layer.kv.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    expected_cache = LayerCache(layer.kv.clone())
    geometry, how = geometry_of(parts, block_tables_of(parts), None), LayerAttention(scale=SCALE)
    sampled = np.arange(len(parts)) % 2
    sampled[: geometry.num_decodes] = 1
    geometry = replace(geometry, num_sampled=sampled)
    qkv = torch.randn(len(geometry.positions), 10, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    step = backend.prepare(geometry, as_int32)
    expected = backend.forward(qkv.clone(), how, expected_cache, step)
    if is_padded:
        rows = as_int32(geometry.rows[geometry.token_seqs])
        step = backend.prepare_padded(geometry, as_int32, rows=rows, num_decodes=geometry.num_decodes, num_chunks=4)
    out = backend.forward(qkv, how, layer, step.of_sampled())
    last = (geometry.first_tokens + geometry.num_new - 1)[sampled > 0]
    torch.testing.assert_close(out[last], expected[last], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.kv, expected_cache.kv, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("window", [None, 20])
@torch.inference_mode()
def test_a_padded_step(name: str, window: int | None) -> None:
    """Equal to the step without padding, whose tokens come first; padding writes nothing to the cache."""
    parts = STEPS[name]
    backend = TritonBackend(cache_shape((6, 2), window), [unrotated(HEAD_DIM)], max_num_seqs=8, pdl=PDL)
    (layer,) = backend.make_cache({window: NUM_BLOCKS})
    layer.kv.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    expected_cache = LayerCache(layer.kv.clone())
    geometry, how = geometry_of(parts, block_tables_of(parts), window), LayerAttention(scale=SCALE, window=window)
    num_tokens = len(geometry.positions)
    qkv = torch.randn(num_tokens, 10, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    expected = backend.forward(qkv.clone(), how, expected_cache, backend.prepare(geometry, as_int32))

    rows = as_int32(padded(geometry.rows[geometry.token_seqs], num_tokens + 9, 0))
    step = backend.prepare_padded(geometry, as_int32, rows=rows, num_decodes=7, num_chunks=4)
    padding = torch.full((9, 10, HEAD_DIM), float("nan"), device=DEVICE)
    out = backend.forward(torch.cat([qkv, padding]), how, layer, step)
    torch.testing.assert_close(out[:num_tokens], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.kv, expected_cache.kv, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_layers_with_sinks_do_not_use_the_kernel_for_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend(cache_shape((2, 1), None), [unrotated(HEAD_DIM)], max_num_seqs=1)
    (layer,) = backend.make_cache({None: NUM_BLOCKS})
    step = backend.prepare(geometry_of([(0, 20)], block_tables_of([(0, 20)]), None), as_int32)
    assert step.chunks is not None
    step = replace(step, chunks=replace(step.chunks, long=True))
    long = types.ModuleType("long_prefill")
    long.long_prefill = chosen = Mock()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nanovllm.kernels.attention.long_prefill", long)
    qkv = torch.randn(20, 4, HEAD_DIM, device=DEVICE)
    backend.forward(qkv, LayerAttention(scale=SCALE, sinks=torch.zeros(2, device=DEVICE)), layer, step)
    assert not chosen.called
    backend.forward(qkv, LayerAttention(scale=SCALE), layer, step)
    assert chosen.called


@pytest.mark.parametrize("kind", Lengths)
@pytest.mark.parametrize(
    ("backend_name", "num_heads", "head_dim", "dtype", "reads_ahead"),
    [
        ("triton", 4, 64, torch.bfloat16, True),
        ("triton", 8, 128, torch.float16, True),
        ("triton", 18, 64, torch.bfloat16, False),
        ("triton", 4, 256, torch.bfloat16, False),
        ("triton", 4, 32, torch.bfloat16, False),
        ("triton", 4, 16, torch.float32, False),
        ("triton deterministic", 4, 64, torch.float32, False),
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_decode_step_that_only_the_device_knows(
    backend_name: str,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    reads_ahead: bool,
    kind: Lengths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal to a step prepared on the host; padding rows among the others write nothing."""
    if DEVICE == "cpu":  # the interpreter runs one program after the other
        monkeypatch.setattr("nanovllm.attention.triton.small_batch_config", lambda *_, **__: SmallBatchConfig(3))
    parts = [(40, 1), (3, 1), (100, 1)]
    shape = CacheShape(
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        windows=(None,),
        dtype=dtype,
        cache_dtype=dtype,
        device=torch.device(DEVICE),
    )
    backend = BACKENDS[backend_name](shape, [unrotated(head_dim)])
    tables = block_tables_of(parts)
    (layer,) = backend.make_cache({None: NUM_BLOCKS})
    layer.kv.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    qkv = torch.randn(3, num_heads + 4, head_dim, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)
    expected_cache = LayerCache(layer.kv.clone())
    step = backend.prepare(geometry_of(parts, tables, None), as_int32)
    how = LayerAttention(scale=SCALE)
    expected = backend.forward(qkv.clone(), how, expected_cache, step)

    rows, known = as_int32(np.array([1, 0, 2, 3, 0])), as_int32(np.array([40, -1, 3, 100, -1]))
    blocks = as_int32(np.concatenate([np.zeros_like(tables[:1]), tables]))
    lengths = as_int32(np.array([0, 41, 4, 101]))
    padded = torch.full((5, num_heads + 4, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    real = torch.tensor([0, 2, 3], device=DEVICE)
    padded[real] = qkv
    positions = torch.full_like(known, 77)
    step = backend.decode_step(rows, positions, blocks={None: blocks}, lengths=lengths, kind=kind)
    if reads_ahead and kind is not Lengths.UNEVEN:
        assert torch.equal(positions, known)
    else:
        assert not step.tables
    positions.copy_(known)
    out = backend.forward(padded, how, layer, step)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out[real], expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(layer.kv, expected_cache.kv, atol=1e-6, rtol=0)
