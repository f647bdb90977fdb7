"""Paged attention with our Triton kernels.

All decodes of a step are one kernel launch, which normalizes, rotates and stores the new keys and values and attends;
small batches have a kernel of their own. Prefill chunks take two launches: one that stores keys and values, and one
that attends through the block tables; long prompts have a kernel of their own on Hopper. In a step with both, chunks
are computed beside the decodes, in a stream of their own: they are bound by computing, decodes by reading the cache.

With `deterministic`, decodes use the prefill kernels too, in tiles of one fixed shape. Then the result of a token
depends neither on the other sequences of the step nor on how its own was divided into chunks.

With a window, kernels start at the tile that holds the first position of the window. Positions before it are masked;
their entries in the block tables may be stale but are always valid block numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import BatchGeometry, CacheShape, LayerAttention, LayerCache
from nanovllm.attention.interface import Lengths
from nanovllm.kernels.attention.decode import paged_decode
from nanovllm.kernels.attention.decode_plan import DecodeConfig, decode_config, plan_decode
from nanovllm.kernels.attention.decode_tables import decode_tables
from nanovllm.kernels.attention.decode_workspace import DecodeWorkspace
from nanovllm.kernels.attention.prefill import paged_prefill, prefill_config, query_tiles
from nanovllm.kernels.attention.rope_store import rope_store
from nanovllm.kernels.attention.small_batch import (
    MAX_PAIRS,
    MAX_PROGRAMS,
    small_batch_config,
    small_batch_decode,
    small_batch_serves,
)

MANY_DECODES, MOST_DECODES = 32, 80  # see `_starts_early`
LONG_PROMPT = 2048  # positions from which on the kernel for long prompts is the faster one


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is launched within runs on this stream, if there is one, after all that was launched before."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def padded(values: np.ndarray, size: int, fill: int | tuple[int, int]) -> np.ndarray:
    return np.concatenate([values, np.full((size - len(values), *values.shape[1:]), fill)])


def long_prefill_serves(shape: CacheShape, tile_rows: int) -> bool:
    """Whether the kernel for long prompts computes such layers, in tiles of as many rows as the other one."""
    same_type = shape.dtype == shape.cache_dtype and shape.dtype.itemsize == 2
    return same_type and shape.head_dim == 128 and tile_rows == 128 and shape.block_size in (16, 32, 64, 128)


@dataclass(frozen=True)
class Chunks:
    """Prefill chunks, whose tokens are adjacent in the step; each tensor is [num_chunks] int32."""

    rows: Tensor
    starts: Tensor
    first_tokens: Tensor
    num_new: Tensor
    tiles: Tensor  # [num_tiles, 2] (chunk, tile of its queries)
    sampled_tiles: Tensor  # [num_tiles, 2] those with tokens after which one is sampled
    # of the tokens from `first_token` on, whose keys and values are stored: row of the request table, and position
    token_rows: Tensor
    token_positions: Tensor  # -1: not stored
    first_token: int = 0
    long: bool = False  # computed by the kernel for long prompts


@dataclass(frozen=True)
class TritonStep:
    rows: Tensor  # [num_decodes] of the request table
    positions: Tensor  # [num_decodes] -1 = padding
    blocks: Mapping[int | None, Tensor]  # by window: [rows of the request table, max_blocks]
    num_decodes: int
    chunks: Chunks | None
    lengths: Lengths  # of the decodes
    # by window, [num_decodes, max_blocks]: the decodes' block tables, if they are a small batch
    tables: Mapping[int | None, Tensor] = field(default_factory=dict)
    planned: dict[int | None, Tensor] = field(default_factory=dict)  # by window: the running number of tiles

    def of_sampled(self) -> "TritonStep":
        """The same without the attention of tokens after which none is sampled; their keys and values are stored."""
        chunks = self.chunks
        return self if chunks is None else replace(self, chunks=replace(chunks, tiles=chunks.sampled_tiles))


class TritonBackend:
    plans_on_device = True

    def __init__(
        self,
        shape: CacheShape,
        rotary_tables: Sequence[Tensor],  # [max_position, head_dim] each
        *,
        max_num_seqs: int,
        deterministic: bool = False,
        pdl: bool = False,  # launch kernels while the one before still runs
        gluon: bool = False,  # the device runs Gluon kernels
    ) -> None:
        self.shape = shape
        self.block_size = shape.block_size
        self._rotary_tables = rotary_tables
        self._deterministic = deterministic
        self._pdl = pdl
        self._group = group = shape.num_heads // shape.num_kv_heads
        self._prefill_config = prefill_config(
            head_dim=shape.head_dim, group=group, dtype=shape.dtype, cache_dtype=shape.cache_dtype
        )
        self._tokens_per_tile = self._prefill_config.block_m // group
        self._has_long_kernel = gluon and not deterministic and long_prefill_serves(shape, self._prefill_config.block_m)
        self._num_sms = 1
        if shape.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(shape.device).multi_processor_count
        self._small_batch = 0  # the largest number of decodes that the kernel for small batches computes
        served = small_batch_serves(head_dim=shape.head_dim, group=group, cache_dtype=shape.cache_dtype)
        if served:
            self._small_batch = MAX_PAIRS // shape.num_kv_heads
        most_programs = max(
            self._decode_config(batch, stream_k=stream_k).num_programs
            for batch in range(1, max_num_seqs + 1)
            for stream_k in (False, True)
        )
        self._workspace = DecodeWorkspace(
            max_batch=max_num_seqs,
            max_programs=max(most_programs, MAX_PROGRAMS if self._small_batch else 0),
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            device=shape.device,
        )
        # one per window, used by all layers of a step
        self._prefixes = {
            window: torch.empty(max_num_seqs + 1, dtype=torch.int32, device=shape.device)
            for window in set(shape.windows)
        }
        self._one_each = torch.ones(max_num_seqs, dtype=torch.int32, device=shape.device)
        # of prefill chunks beside decodes; its programs come first, because there are few of them
        self._side_stream = torch.cuda.Stream(shape.device, priority=-1) if shape.device.type == "cuda" else None
        self._numbers = torch.arange(max_num_seqs, dtype=torch.int32, device=shape.device)
        self._first_tiles = torch.stack([self._numbers, torch.zeros_like(self._numbers)], dim=1)

    def _decode_config(self, batch: int, *, stream_k: bool) -> DecodeConfig:
        s = self.shape
        return decode_config(
            batch,
            kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            cache_dtype=s.cache_dtype,
            num_sms=self._num_sms,
            stream_k=stream_k,
        )

    def _starts_early(self, num_decodes: int) -> bool:
        """Whether programs may start before the projection of queries, keys and values has ended.

        If they just fill the GPU, some multiprocessors would get too many of them. With several waves this evens out,
        except with an 8-bit cache, where it measured slower.
        """
        if num_decodes < MANY_DECODES:
            return True
        return num_decodes >= MOST_DECODES and self.shape.cache_dtype.itemsize > 1

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        made = {window: iter(self._group_cache(window, num_blocks[window])) for window in set(self.shape.windows)}
        return [next(made[window]) for window in self.shape.windows]

    def _group_cache(self, window: int | None, num_blocks: int) -> list[LayerCache]:
        """The caches of the layers with this window, views of one tensor."""
        s = self.shape
        slots = (s.windows.count(window), 2, num_blocks, s.num_kv_heads, s.block_size)
        # zeros, because a tile may read positions that were never written, and NaN * 0 is NaN
        kv = torch.zeros((*slots, s.head_dim), dtype=s.cache_dtype, device=s.device)
        if s.cache_dtype.itemsize > 1:
            return [LayerCache(layer) for layer in kv]
        scales = torch.zeros(slots, dtype=torch.bfloat16, device=s.device)
        return [LayerCache(layer, of_layer) for layer, of_layer in zip(kv, scales, strict=True)]

    # --- once per step ------------------------------------------------------------------------------------------------

    def prepare(self, geometry: BatchGeometry, upload: Callable[[np.ndarray], Tensor]) -> TritonStep:
        num_decodes = 0 if self._deterministic else geometry.num_decodes
        chunks = None
        if len(geometry.rows) > num_decodes:
            rest = slice(num_decodes, None)
            starts, num_new = geometry.starts[rest], geometry.num_new[rest]
            chunks = Chunks(
                rows=upload(geometry.rows[rest]),
                starts=upload(starts),
                first_tokens=upload(geometry.first_tokens[rest]),
                num_new=upload(num_new),
                tiles=upload(query_tiles(starts, num_new, self._tokens_per_tile)),
                sampled_tiles=upload(query_tiles(starts, num_new, self._tokens_per_tile, geometry.num_sampled[rest])),
                token_rows=geometry.device_rows[rest],
                token_positions=geometry.device_positions[rest],
                first_token=num_decodes,
                long=self._has_long_kernel and int((starts + num_new).max()) >= LONG_PROMPT,
            )
        return TritonStep(
            rows=geometry.device_rows[:num_decodes],
            positions=geometry.device_positions[:num_decodes],
            blocks=geometry.device_blocks,
            num_decodes=num_decodes,
            chunks=chunks,
            lengths=Lengths.of(geometry.starts[:num_decodes]),
        )

    def prepare_padded(
        self,
        geometry: BatchGeometry,
        upload: Callable[[np.ndarray], Tensor],
        *,
        rows: Tensor,  # [num_tokens] of the request table
        num_decodes: int,
        num_chunks: int,
    ) -> TritonStep:
        """The same as `prepare`, padded to these numbers: the sizes of all arrays and launches depend on nothing else,
        so that the step can be recorded. Tokens after those of the sequences are padding."""
        n, num_tokens = geometry.num_decodes, len(rows)
        starts, num_new = geometry.starts[n:], geometry.num_new[n:]
        token_positions = padded(geometry.positions, num_tokens, -1)
        token_positions[:n] = -1  # the kernel for decodes stores theirs
        tiles = query_tiles(starts, num_new, self._tokens_per_tile)
        sampled_tiles = query_tiles(starts, num_new, self._tokens_per_tile, geometry.num_sampled[n:])
        num_tiles = num_tokens // self._tokens_per_tile + num_chunks
        chunks = Chunks(
            rows=upload(padded(geometry.rows[n:], num_chunks + 1, 0)),
            starts=upload(padded(starts, num_chunks + 1, -1)),
            first_tokens=upload(padded(geometry.first_tokens[n:], num_chunks + 1, 0)),
            num_new=upload(padded(num_new, num_chunks + 1, 0)),
            tiles=upload(padded(tiles, num_tiles, (num_chunks, 0))),
            sampled_tiles=upload(padded(sampled_tiles, num_chunks, (num_chunks, 0))),
            token_rows=rows,
            token_positions=upload(token_positions),
        )
        return TritonStep(
            rows=rows[:num_decodes],
            positions=upload(padded(geometry.positions[:n], num_decodes, -1)),
            blocks=geometry.device_blocks,
            num_decodes=num_decodes,
            chunks=chunks,
            lengths=Lengths.SIMILAR,
        )

    def decode_step(
        self,
        rows: Tensor,
        positions: Tensor,
        *,
        blocks: Mapping[int | None, Tensor],
        lengths: Tensor,
        kind: Lengths,
    ) -> TritonStep:
        n, num_decodes, chunks = len(rows), len(rows), None
        tables: dict[int | None, Tensor] = {}
        if self._deterministic:
            numbers, ones, tiles = self._numbers[:n], self._one_each[:n], self._first_tiles[:n]
            chunks = Chunks(rows, positions, numbers, ones, tiles, tiles, token_rows=rows, token_positions=positions)
            num_decodes = 0
        elif n <= self._small_batch and kind is not Lengths.UNEVEN:
            for window, all_blocks in blocks.items():
                tables[window] = torch.empty(n, all_blocks.shape[1], dtype=torch.int32, device=all_blocks.device)
                decode_tables(rows, all_blocks, lengths, tables=tables[window], positions=positions)
        return TritonStep(
            rows=rows,
            positions=positions,
            blocks=blocks,
            num_decodes=num_decodes,
            chunks=chunks,
            lengths=kind,
            tables=tables,
        )

    # --- once per layer -----------------------------------------------------------------------------------------------

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: TritonStep) -> Tensor:
        s = self.shape
        out = torch.empty(qkv.shape[0], s.num_heads * s.head_dim, dtype=qkv.dtype, device=qkv.device)
        side_stream = self._side_stream if step.num_decodes and step.chunks is not None else None
        if step.chunks is not None:
            with beside(side_stream):
                self._prefill(qkv, layer, cache, step, step.chunks, out)
        if step.tables:
            self._decode_small_batch(qkv, layer, cache, step, step.tables[layer.window], out)
        elif step.num_decodes:
            self._decode(qkv[: step.num_decodes], layer, cache, step, out[: step.num_decodes])
        if side_stream is not None:
            torch.cuda.current_stream().wait_stream(side_stream)
        return out

    def _decode_small_batch(
        self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: TritonStep, tables: Tensor, out: Tensor
    ) -> None:
        config = small_batch_config(
            len(tables) * self.shape.num_kv_heads,
            self._group,
            window=layer.window,
            sinks=layer.sinks is not None,
            long=step.lengths is Lengths.LONG,
        )
        small_batch_decode(
            qkv,
            cache.kv,
            positions=step.positions,
            tables=tables,
            workspace=self._workspace,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=layer.norm_eps,
            cos_sin=self._rotary_tables[layer.rope],
            scale=layer.scale,
            window=layer.window,
            sinks=layer.sinks,
            out=out,
            config=config,
            pdl=self._pdl,
        )

    def _decode(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: TritonStep, out: Tensor) -> None:
        window = layer.window
        n = step.num_decodes
        config = self._decode_config(n, stream_k=step.lengths is Lengths.UNEVEN)
        prefix = step.planned.get(window)
        if prefix is None and not config.splits:
            prefix = step.planned[window] = self._prefixes[window][: n + 1]
            plan_decode(step.positions, prefix, tile=config.tile, window=window, pdl=self._pdl)
        paged_decode(
            qkv,
            cache.kv,
            cache.scales,
            rows=step.rows,
            positions=step.positions,
            blocks=step.blocks[window],
            prefix=prefix,
            workspace=self._workspace,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=layer.norm_eps,
            cos_sin=self._rotary_tables[layer.rope],
            window=window,
            scale=layer.scale,
            sinks=layer.sinks,
            out=out,
            config=config,
            pdl=self._pdl,
            early=self._pdl and self._starts_early(n),
        )

    def _prefill(
        self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: TritonStep, chunks: Chunks, out: Tensor
    ) -> None:
        s = self.shape
        rope_store(
            qkv[chunks.first_token :],
            cache.kv,
            cache.scales,
            rows=chunks.token_rows,
            positions=chunks.token_positions,
            blocks=step.blocks[layer.window],
            k_norm=layer.k_norm,
            eps=layer.norm_eps,
            cos_sin=self._rotary_tables[layer.rope],
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            pdl=self._pdl,
        )
        if not len(chunks.tiles):
            return
        attend: Callable[..., None]
        if chunks.long and layer.sinks is None:
            from nanovllm.kernels.attention.long_prefill import long_prefill

            attend = partial(long_prefill, qkv, cache.kv)
        else:
            attend = partial(paged_prefill, qkv, cache.kv, cache.scales, config=self._prefill_config, pdl=self._pdl)
            attend = partial(attend, sinks=layer.sinks)
        attend(
            q_norm=layer.q_norm,
            eps=layer.norm_eps,
            cos_sin=self._rotary_tables[layer.rope],
            chunk_rows=chunks.rows,
            chunk_starts=chunks.starts,
            chunk_first_tokens=chunks.first_tokens,
            chunk_num_new=chunks.num_new,
            tiles=chunks.tiles,
            blocks=step.blocks[layer.window],
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            window=layer.window,
            scale=layer.scale,
            out=out,
        )
