"""Paged attention in plain torch: gather the blocks of a sequence, then call `scaled_dot_product_attention`.

Decodes of similar length are gathered and computed together, padded to the longest of them. The query heads that share
a KV head are rows of one small matrix, so grouped-query attention copies no keys. Prefill chunks are computed one by
one: a chunk that starts at position 0 uses its own new keys, a later chunk gathers them from its blocks.

With a window, only blocks that the window touches are gathered: earlier ones may hold tokens of other sequences.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import BatchGeometry, CacheShape, LayerAttention, LayerCache
from nanovllm.attention.rotation import Rotation, norm_heads, rotate

NEVER = float("-inf")
MAX_PADDING = 1_000_000  # elements of keys and values; reading more of them takes longer than another group's calls


@dataclass(frozen=True)
class Pages:
    """Which blocks of a layer's cache to gather, and the buffer to gather them into, which all layers use."""

    index: Tensor  # [2 * seqs * kv_heads * blocks] rows of the cache as [k|v * block * kv_head, position * head_dim]
    buffer: Tensor  # [len(index), block_size * head_dim]
    keys: Tensor  # [seqs, kv_heads, length, head_dim], a view of the buffer
    values: Tensor


@dataclass(frozen=True)
class Part:
    """Sequences of a step that are computed together: decodes of similar length, or one prefill chunk."""

    tokens: slice | Tensor  # their tokens among those of the step
    num_new: int  # tokens of each
    pages: Pages | None  # None = a chunk that starts at position 0, so all keys are its own
    mask: Tensor | None  # [seqs, 1, num_new, length]; None = causal without pages, nothing masked with them


@dataclass(frozen=True)
class SdpaStep:
    cos_sin: list[tuple[Tensor, Tensor]]  # by rotary table: cosines and sines of each token's position
    # by window
    begun: dict[int | None, Tensor]  # the last blocks of sequences that begin them in this step, as Pages.index
    slots: dict[int | None, Tensor]  # [num_tokens * 2 * kv_heads] rows of the cache as [-1, head_dim]
    parts: dict[int | None, list[Part]]


class SdpaBackend:
    plans_on_device = False
    num_stored = 2  # vectors of a token and KV head in the cache: key and value

    def __init__(self, shape: CacheShape, rotary_tables: Sequence[Tensor]) -> None:  # [max_position, head_dim] each
        self.shape, self.block_size = shape, shape.block_size
        self._rotations = [Rotation(shape, table) for table in rotary_tables]
        self._windows = set(shape.windows)
        # torch's CPU kernel reads a shared KV head in place; on CUDA some dtypes would fall back to a slow path
        self._shares_heads = shape.device.type == "cpu" and shape.num_heads > shape.num_kv_heads
        self._first: dict[int | None, np.ndarray] = {}  # by window: [k|v, kv_heads] the pages of block 0
        self._buffer = torch.empty(0, dtype=shape.cache_dtype, device=shape.device)

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        s = self.shape
        for window in self._windows:
            first = np.arange(self.num_stored) * num_blocks[window] * s.num_kv_heads
            self._first[window] = first[:, None] + np.arange(s.num_kv_heads)
        sizes = [(self.num_stored, num_blocks[w], s.num_kv_heads, s.block_size, s.head_dim) for w in s.windows]
        return [LayerCache(zeros(size, s.cache_dtype, s.device)) for size in sizes]

    def prepare(self, geometry: BatchGeometry, upload: Callable[[np.ndarray], Tensor]) -> SdpaStep:
        positions = self._tensor(geometry.positions)
        return SdpaStep(
            cos_sin=[rotation.gather(positions) for rotation in self._rotations],
            begun={window: self._begun(geometry, window) for window in self._windows},
            slots={window: self._slots(geometry, window) for window in self._windows},
            parts={window: self._parts(geometry, window) for window in self._windows},
        )

    def _slots(self, geometry: BatchGeometry, window: int | None) -> Tensor:
        size, positions = self.shape.block_size, geometry.positions
        blocks = geometry.block_tables[window][geometry.token_seqs, positions // size]
        pages = self._first[window] + blocks[:, None, None] * self.shape.num_kv_heads  # [num_tokens, k|v, kv_heads]
        return self._tensor(pages * size + (positions % size)[:, None, None]).view(-1)

    def _begun(self, geometry: BatchGeometry, window: int | None) -> Tensor:
        last = (geometry.starts + geometry.num_new - 1) // self.block_size
        seqs = np.flatnonzero(last * self.block_size >= geometry.starts)
        return self._index(geometry.block_tables[window][seqs, last[seqs], None], window)

    def _parts(self, geometry: BatchGeometry, window: int | None) -> list[Part]:
        num_decodes = geometry.num_decodes
        num_read = geometry.starts[:num_decodes] + 1
        if window is not None:
            num_read = np.minimum(num_read, window)
        groups = [np.arange(num_decodes)] if num_decodes else []
        most_padding = MAX_PADDING // (2 * self.shape.num_kv_heads * self.shape.head_dim)  # in positions
        if num_decodes and num_read.max() * num_decodes - num_read.sum() > most_padding:
            from nanovllm.attention.length_groups import similar

            groups = similar(num_read, most_padding)
        chunks = (np.array([index]) for index in range(num_decodes, len(geometry.starts)))
        return [self._part(seqs, geometry, window) for seqs in (*groups, *chunks)]

    def _part(self, seqs: np.ndarray, geometry: BatchGeometry, window: int | None) -> Part:
        size = self.shape.block_size
        starts, num_new = geometry.starts[seqs], int(geometry.num_new[seqs[0]])
        ends = starts + num_new
        reach = int(ends.max()) if window is None else window  # positions that a token attends to
        token = int(geometry.first_tokens[seqs[0]])
        tokens: slice | Tensor = slice(token, token + len(seqs) * num_new)
        if not np.array_equal(seqs, np.arange(seqs[0], seqs[0] + len(seqs))):
            tokens = self._tensor(seqs)  # decodes, which have one token each and come first
        own_keys = len(seqs) == 1 and starts[0] == 0
        if own_keys and num_new <= reach:
            return Part(tokens, num_new, pages=None, mask=None)
        first_block = np.maximum(starts - reach + 1, 0) // size  # earlier blocks may be other sequences' by now
        length = int((ends - first_block * size).max())
        queries = starts[:, None] + np.arange(num_new)
        keys = (first_block * size)[:, None] + np.arange(length)
        distance = queries[:, :, None] - keys[:, None, :]
        seen = (distance >= 0) & (distance < reach)
        mask = None if seen.all() else self._mask(seen)[:, None]
        if own_keys:
            return Part(tokens, num_new, pages=None, mask=mask)
        columns = first_block[:, None] + np.arange(-(-length // size))
        columns = np.minimum(columns, (ends[:, None] - 1) // size)  # padding repeats the sequence's last block
        blocks = geometry.block_tables[window][seqs[:, None], columns]
        return Part(tokens, num_new, self._pages(blocks, length, window), mask)

    def _index(self, blocks: np.ndarray, window: int | None) -> Tensor:  # [seqs, blocks]
        first = self._first[window][:, None, :, None]
        return self._tensor(first + blocks[:, None, :] * self.shape.num_kv_heads).view(-1)

    def _pages(self, blocks: np.ndarray, length: int, window: int | None) -> Pages:  # [seqs, blocks]
        s, index = self.shape, self._index(blocks, window)
        size = len(index) * s.block_size * s.head_dim
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=s.cache_dtype, device=s.device)
        buffer = self._buffer[:size].view(len(index), -1)
        kv = buffer.view(self.num_stored, len(blocks), s.num_kv_heads, -1, s.head_dim)[..., :length, :]
        return Pages(index, buffer, kv[0], kv[-1])

    def _mask(self, seen: np.ndarray) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self.shape.dtype)
        return mask.masked_fill_(torch.from_numpy(~seen), NEVER).to(self.shape.device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.shape.device)

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: SdpaStep) -> Tensor:
        s, kv = self.shape, cache.kv
        if layer.both_norms is not None:
            qkv = norm_heads(qkv, layer.both_norms, layer.norm_eps)
        qkv = rotate(qkv, step.cos_sin[layer.rope])
        new = qkv[:, s.num_heads :].reshape(-1, s.head_dim)  # of each token the keys, then the values
        self._store(new, kv, layer.window, step)
        parts = step.parts[layer.window]
        if len(parts) == 1:
            return self._attend(qkv, kv, parts[0], layer)
        out = torch.empty(qkv.shape[0], s.num_heads * s.head_dim, dtype=qkv.dtype, device=qkv.device)
        for part in parts:
            out[part.tokens] = self._attend(qkv[part.tokens], kv, part, layer)
        return out

    def _store(self, new: Tensor, kv: Tensor, window: int | None, step: SdpaStep) -> None:
        """What others left in a block is erased before it is used: padding reads it, and NaN * 0 is NaN."""
        if len(step.begun[window]):
            kv.view(-1, self.block_size * self.shape.head_dim).index_fill_(0, step.begun[window], 0)
        kv.view(-1, self.shape.head_dim).index_copy_(0, step.slots[window], new.to(self.shape.cache_dtype))

    def _gather(self, kv: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
        """Keys and values as [seqs, kv_heads, length, head_dim]; the next gather overwrites them."""
        torch.index_select(kv.view(-1, pages.buffer.shape[1]), 0, pages.index, out=pages.buffer)
        if self.shape.cache_dtype == self.shape.dtype:
            return pages.keys, pages.values
        return pages.keys.to(self.shape.dtype), pages.values.to(self.shape.dtype)

    def _attend(self, qkv: Tensor, kv: Tensor, part: Part, layer: LayerAttention) -> Tensor:
        s, mask, scale = self.shape, part.mask, layer.scale
        if layer.sinks is not None:
            from nanovllm.attention.sinks import attend_with_sinks

            cached = None if part.pages is None else self._gather(kv, part.pages)
            return attend_with_sinks(qkv, cached, s, mask=mask, scale=scale, sinks=layer.sinks)
        group = s.num_heads // s.num_kv_heads
        if part.pages is not None and part.num_new == 1:
            keys, values = self._gather(kv, part.pages)
            queries = qkv[:, : s.num_heads].view(-1, s.num_kv_heads, group, s.head_dim)
            out = attend(queries, keys, values, mask, scale)
            return out.reshape(out.shape[0], -1)  # from [seqs, kv_heads, heads of a kv_head, head_dim]
        heads = qkv.transpose(0, 1).unsqueeze(0)  # [1, heads of q, k, v, num_new, head_dim]
        queries, keys, values = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        if part.pages is not None:
            keys, values = self._gather(kv, part.pages)
        if group > 1 and not self._shares_heads:
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=self._shares_heads
        )  # [1, heads, num_new, head_dim]
        return out[0].transpose(0, 1).reshape(part.num_new, -1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """On a CPU, call the kernel directly: for a few rows, torch's choice of a kernel takes a large part of the time."""
    if queries.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(queries, keys, values, attn_mask=mask, scale=scale)[0]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that the operating system provides when it is first written, as NumPy allocates it."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)
