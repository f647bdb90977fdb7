"""Latent attention (MLA) whose decode steps our kernels compute; prompts and mixed steps are computed by torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.backend import CacheShape, LayerAttention, LayerCache
from nanovllm.attention.interface import Lengths
from nanovllm.attention.latent import LatentBackend, LatentLayer
from nanovllm.attention.sdpa import SdpaStep
from nanovllm.kernels.attention.latent_decode import latent_decode, latent_store, num_splits


@dataclass(frozen=True)
class LatentDecode:
    """A step of decodes alone, as the device knows it."""

    rows: Tensor  # [n] of the request table
    positions: Tensor  # [n] -1 = padding
    blocks: Tensor  # [rows of the request table, max_blocks]


class LatentKernelBackend(LatentBackend):
    plans_on_device = True

    def __init__(self, shape: CacheShape, rotary_tables: Sequence[Tensor], **sizes: int) -> None:
        super().__init__(shape, rotary_tables, **sizes)
        self._tables = rotary_tables
        self._num_sms = 1
        if shape.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(shape.device).multi_processor_count

    def decode_step(
        self,
        rows: Tensor,
        positions: Tensor,
        *,
        blocks: Mapping[int | None, Tensor],
        lengths: Tensor,
        kind: Lengths,  # all lengths are computed in the same way
    ) -> LatentDecode:
        return LatentDecode(rows, positions, blocks[None])

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: SdpaStep | LatentDecode) -> Tensor:
        if isinstance(step, SdpaStep):
            return super().forward(qkv, layer, cache, step)
        assert isinstance(layer, LatentLayer)
        s = self.shape
        kv = cache.kv.view(-1, s.block_size, s.head_dim)
        queries, new = qkv.split([s.num_heads * self._query_size, s.head_dim], dim=1)
        same: dict[str, Any] = dict(rows=step.rows, positions=step.positions, blocks=step.blocks)
        same["cos_sin"] = self._tables[layer.rope]
        latent_store(new, kv, **same)
        plain, rotated = queries.unflatten(1, (s.num_heads, -1)).tensor_split((self._plain_size,), dim=-1)
        up_k, up_v = layer.kv_b.tensor_split((self._plain_size,), dim=1)
        absorbed = torch.bmm(plain.transpose(0, 1), up_k)  # [heads, n, latent_size]
        splits = num_splits(len(qkv), s.num_heads, num_sms=self._num_sms)
        out = latent_decode(absorbed, rotated, kv, scale=layer.scale, splits=splits, **same)
        return torch.bmm(out, up_v.transpose(1, 2)).transpose(0, 1).flatten(1)
