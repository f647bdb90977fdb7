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
class DecodeGroup:
    """Decodes of similar length."""

    rows: Tensor | None  # [group] indices of the decodes; None = all, in order
    pages: Pages
    mask: Tensor | None  # [group, 1, 1, length]; None = all gathered positions are read


@dataclass(frozen=True)
class PrefillChunk:
    first: int  # token index of the chunk's first token in the step
    num_new: int
    pages: Pages | None  # None = the chunk starts at position 0, so there is nothing to gather
    mask: Tensor | None  # [num_new, kv_len]; None = causal, all keys are the chunk's own


@dataclass(frozen=True)
class WindowStep:
    """A step in the layers of one window."""

    slots: Tensor  # [num_tokens * 2 * kv_heads] rows of the cache as [k|v * block * kv_head * position, head_dim]
    decodes: list[DecodeGroup]
    chunks: list[PrefillChunk]


@dataclass(frozen=True)
class SdpaStep:
    cos_sin: list[tuple[Tensor, Tensor]]  # by rotary table: cosines and sines of each token's position
    num_decodes: int
    windows: dict[int | None, WindowStep]


class SdpaBackend:
    plans_on_device = False

    def __init__(self, shape: CacheShape, rotary_tables: Sequence[Tensor]) -> None:  # [max_position, head_dim] each
        self.shape = shape
        self._rotations = [Rotation(shape, table) for table in rotary_tables]
        self.block_size = shape.block_size
        self._windows = set(shape.windows)
        self._heads = np.arange(shape.num_kv_heads)
        # torch's CPU kernel reads a shared KV head in place; on CUDA some dtypes would fall back to a slow path
        self._shares_heads = shape.device.type == "cpu" and shape.num_heads > shape.num_kv_heads
        self._num_pages: dict[int | None, int] = {}  # by window: blocks * kv_heads, where values begin
        self._buffer = torch.empty(0, dtype=shape.cache_dtype, device=shape.device)

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        s = self.shape
        self._num_pages = {window: num_blocks[window] * s.num_kv_heads for window in self._windows}
        sizes = [(2, num_blocks[window], s.num_kv_heads, s.block_size, s.head_dim) for window in s.windows]
        # zeros, because padding may read positions that were never written, and NaN * 0 is NaN
        return [LayerCache(zeros(size, s.cache_dtype, s.device)) for size in sizes]

    # --- once per step ------------------------------------------------------------------------------------------------

    def prepare(self, geometry: BatchGeometry, upload: Callable[[np.ndarray], Tensor]) -> SdpaStep:
        positions = self._tensor(geometry.positions)
        return SdpaStep(
            cos_sin=[rotation.gather(positions) for rotation in self._rotations],
            num_decodes=geometry.num_decodes,
            windows={
                w: WindowStep(self._slots(geometry, w), self._decode_groups(geometry, w), self._chunks(geometry, w))
                for w in self._windows
            },
        )

    def _slots(self, geometry: BatchGeometry, window: int | None) -> Tensor:
        size = self.shape.block_size
        positions = geometry.positions
        blocks = geometry.block_tables[window][geometry.token_seqs, positions // size]
        keys = (blocks[:, None] * self.shape.num_kv_heads + self._heads) * size + (positions % size)[:, None]
        return self._tensor(np.concatenate([keys, keys + self._num_pages[window] * size], axis=1).reshape(-1))

    def _decode_groups(self, geometry: BatchGeometry, window: int | None) -> list[DecodeGroup]:
        if not geometry.num_decodes:
            return []
        kv_len = geometry.starts[: geometry.num_decodes] + 1
        first = np.maximum(kv_len - window, 0) if window else np.zeros_like(kv_len)
        first_block = first // self.shape.block_size
        num_blocks = (kv_len - 1) // self.shape.block_size + 1 - first_block
        return [
            self._decode_group(rows, geometry, window, kv_len, first, first_block, int(num_blocks[rows].max()))
            for rows in _similar(kv_len - first, 2 * self.shape.num_kv_heads * self.shape.head_dim)
        ]

    def _decode_group(
        self,
        rows: np.ndarray,
        geometry: BatchGeometry,
        window: int | None,
        kv_len: np.ndarray,  # [num_decodes]
        first: np.ndarray,  # [num_decodes] first position that is read
        first_block: np.ndarray,  # [num_decodes]
        num_blocks: int,
    ) -> DecodeGroup:
        size = self.shape.block_size
        columns = first_block[rows, None] + np.arange(num_blocks)
        columns = np.minimum(columns, (kv_len[rows, None] - 1) // size)  # padding repeats the sequence's last block
        offset = first_block[rows] * size
        begin, end = first[rows] - offset, kv_len[rows] - offset  # what is read, counted from the gathered ones
        max_len = int(end.max())
        everything = not begin.any() and bool((end == max_len).all())
        positions = np.arange(max_len)
        seen = (positions >= begin[:, None]) & (positions < end[:, None])
        return DecodeGroup(
            rows=None if len(rows) == len(kv_len) else self._tensor(rows),
            pages=self._pages(geometry.block_tables[window][rows[:, None], columns], max_len, window),
            mask=None if everything else self._mask(seen)[:, None, None, :],
        )

    def _chunks(self, geometry: BatchGeometry, window: int | None) -> list[PrefillChunk]:
        chunks = []
        for index in range(geometry.num_decodes, len(geometry.starts)):
            start, num_new = int(geometry.starts[index]), int(geometry.num_new[index])
            kv_len = start + num_new
            seen_back = kv_len if window is None else window
            first_block = max(start - seen_back + 1, 0) // self.shape.block_size
            first = first_block * self.shape.block_size  # blocks before have left the window and may be others' by now
            mask = None
            if start or kv_len > seen_back:
                distance = np.arange(start, kv_len)[:, None] - np.arange(first, kv_len)
                mask = self._mask((distance >= 0) & (distance < seen_back))
            pages = None
            if start:
                blocks = slice(first_block, -(-kv_len // self.shape.block_size))
                pages = self._pages(geometry.block_tables[window][index : index + 1, blocks], kv_len - first, window)
            chunks.append(PrefillChunk(int(geometry.first_tokens[index]), num_new, pages, mask))
        return chunks

    def _pages(self, block_tables: np.ndarray, length: int, window: int | None) -> Pages:  # [seqs, blocks]
        s = self.shape
        keys = block_tables[:, None, :] * s.num_kv_heads + self._heads[:, None]  # [seqs, kv_heads, blocks]
        index = self._tensor(np.stack([keys, keys + self._num_pages[window]]).reshape(-1))
        size = len(index) * s.block_size * s.head_dim
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=s.cache_dtype, device=s.device)
        buffer = self._buffer[:size].view(len(index), -1)
        kv = buffer.view(2, len(block_tables), s.num_kv_heads, -1, s.head_dim)[..., :length, :]
        return Pages(index, buffer, kv[0], kv[1])

    def _mask(self, seen: np.ndarray) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self.shape.dtype)
        return mask.masked_fill_(torch.from_numpy(~seen), NEVER).to(self.shape.device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.shape.device)

    # --- once per layer -----------------------------------------------------------------------------------------------

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: SdpaStep) -> Tensor:
        s, kv, scale = self.shape, cache.kv, layer.scale
        if layer.both_norms is not None:
            qkv = norm_heads(qkv, layer.both_norms, layer.norm_eps)
        qkv = rotate(qkv, step.cos_sin[layer.rope])
        here = step.windows[layer.window]
        new = qkv[:, s.num_heads :].reshape(-1, s.head_dim)  # of each token the keys, then the values
        kv.view(-1, s.head_dim).index_copy_(0, here.slots, new.to(s.cache_dtype))
        if len(here.decodes) == 1 and not here.chunks:
            return self._decode(qkv, kv, here.decodes[0], scale)
        out = torch.empty(qkv.shape[0], s.num_heads * s.head_dim, dtype=qkv.dtype, device=qkv.device)
        for group in here.decodes:
            rows = slice(0, step.num_decodes) if group.rows is None else group.rows
            out[rows] = self._decode(qkv[rows], kv, group, scale)
        for chunk in here.chunks:
            rows = slice(chunk.first, chunk.first + chunk.num_new)
            out[rows] = self._prefill(qkv[rows], kv, chunk, scale)
        return out

    def _gather(self, kv: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
        """Keys and values as [seqs, kv_heads, length, head_dim]; the next gather overwrites them."""
        torch.index_select(kv.view(-1, pages.buffer.shape[1]), 0, pages.index, out=pages.buffer)
        if self.shape.cache_dtype == self.shape.dtype:
            return pages.keys, pages.values
        return pages.keys.to(self.shape.dtype), pages.values.to(self.shape.dtype)

    def _decode(self, qkv: Tensor, kv: Tensor, group: DecodeGroup, scale: float) -> Tensor:
        s = self.shape
        keys, values = self._gather(kv, group.pages)
        queries = qkv[:, : s.num_heads].view(-1, s.num_kv_heads, s.num_heads // s.num_kv_heads, s.head_dim)
        out = attend(queries, keys, values, group.mask, scale)
        return out.reshape(out.shape[0], -1)  # from [seqs, kv_heads, heads of a kv_head, head_dim]

    def _prefill(self, qkv: Tensor, kv: Tensor, chunk: PrefillChunk, scale: float) -> Tensor:
        s = self.shape
        heads = qkv.transpose(0, 1).unsqueeze(0)  # [1, heads of q, k, v, num_new, head_dim]
        queries, keys, values = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        if chunk.pages is not None:
            keys, values = self._gather(kv, chunk.pages)
        group = s.num_heads // s.num_kv_heads
        if group > 1 and not self._shares_heads:
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scale,
            enable_gqa=self._shares_heads,
        )  # [1, heads, num_new, head_dim]
        return out[0].transpose(0, 1).reshape(chunk.num_new, -1)


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
    raw = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)


def _similar(lengths: np.ndarray, width: int) -> list[np.ndarray]:
    """Split sequences into groups of similar length: a group ends where its padding would exceed MAX_PADDING elements.

    `width`: number of elements of one position.
    """
    if (lengths.max() * len(lengths) - lengths.sum()) * width <= MAX_PADDING:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    groups, begin, padding = [], 0, 0
    for i, row in enumerate(order):
        padding += int(lengths[order[begin]] - lengths[row]) * width
        if padding > MAX_PADDING:
            groups.append(order[begin:i])
            begin, padding = i, 0
    return [*groups, order[begin:]]
