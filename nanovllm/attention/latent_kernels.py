"""Latent attention (MLA) whose decode steps our kernels compute; prompts and mixed steps are computed by torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.backend import CacheShape, LayerCache
from nanovllm.attention.interface import Lengths
from nanovllm.attention.latent import LatentBackend, LatentLayer
from nanovllm.attention.sdpa import SdpaStep
from nanovllm.kernels.attention.latent_decode import latent_decode, latent_parts, num_splits
from nanovllm.kernels.attention.latent_rows import MAX_TOKENS, absorb_and_store, merge_and_project
from nanovllm.kernels.attention.latent_store import latent_store
from nanovllm.kernels.features import features_of
from nanovllm.kernels.select import latent_on_hopper


@dataclass(frozen=True)
class LatentDecode:
    """A step of decodes alone, as the device knows it."""

    rows: Tensor  # [n] of the request table
    positions: Tensor  # [n] -1 = padding
    blocks: Tensor  # [rows of the request table, max_blocks]
    long: bool  # a few long sequences


class LatentKernelBackend(LatentBackend):
    plans_on_device = True

    def __init__(self, shape: CacheShape, rotary_tables: Sequence[Tensor], **sizes: int) -> None:
        super().__init__(shape, rotary_tables, **sizes)
        self._tables = rotary_tables
        features = features_of(shape.device.type)
        self._pdl = features["pdl"]
        self._hopper = latent_on_hopper(
            self._latent_size, self._rotated_size, half=shape.dtype.itemsize == 2, gluon=features["gluon"]
        )
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
        kind: Lengths,
    ) -> LatentDecode:
        # here, because kernels read them before the embedding, which writes them again, has ended
        torch.sub(lengths[rows], 1, out=positions)
        return LatentDecode(rows, positions, blocks[None], long=kind is Lengths.LONG)

    def attend(
        self, queries: Tensor, new: Tensor, layer: LatentLayer, cache: LayerCache, step: SdpaStep | LatentDecode
    ) -> Tensor:
        if isinstance(step, SdpaStep):
            return super().attend(queries, new, layer, cache, step)
        s, n, pdl = self.shape, len(queries), self._pdl
        kv = cache.kv.view(-1, s.block_size, s.head_dim)
        same: dict[str, Any] = dict(rows=step.rows, positions=step.positions, blocks=step.blocks, pdl=pdl)
        same["cos_sin"] = self._tables[layer.rope]
        splits = num_splits(n, s.num_heads, num_sms=self._num_sms, hopper=self._hopper, long=step.long)
        how: dict[str, Any] = dict(scale=layer.scale, splits=splits, hopper=self._hopper, **same)
        stored = (new, kv, layer.norm.weight, layer.norm.eps)
        queries = queries.unflatten(1, (s.num_heads, -1))
        plain, rotated = queries.tensor_split((self._plain_size,), dim=-1)
        up_k, up_v = layer.kv_b.tensor_split((self._plain_size,), dim=1)
        if n <= MAX_TOKENS and splits > 1:
            absorbed = absorb_and_store(queries, layer.kv_b, *stored, **same)
            parts, sums = latent_parts(absorbed, rotated, kv, **how)
            return merge_and_project(parts, sums, up_v, positions=step.positions, pdl=pdl)
        latent_store(*stored, **same)
        absorbed = torch.bmm(plain.transpose(0, 1), up_k)  # [heads, n, latent_size]
        gathered = latent_decode(absorbed, rotated, kv, **how)
        out = torch.empty(n, s.num_heads, up_v.shape[1], dtype=queries.dtype, device=queries.device)
        torch.bmm(gathered, up_v.transpose(1, 2), out=out.transpose(0, 1))
        return out.flatten(1)
