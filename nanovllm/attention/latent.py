"""Multi-head latent attention (MLA) in plain torch: the cache has one vector per token, the latent and a rotated key.

A head's key is up_k(latent) beside the rotated key, its value is up_v(latent). Sequences that read the cache, such as
decodes, are computed in the absorbed form, which never makes keys and values: q · up_k(latent) = up_k^T(q) · latent, so
the query is multiplied with up_k, all heads attend to the latents, and up_v is applied to the result. A chunk that
starts at position 0 has as many queries as keys: making these costs the same as absorbing, and products with them are
smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import CacheShape, LayerAttention, LayerCache
from nanovllm.attention.rotation import rotate
from nanovllm.attention.sdpa import Part, SdpaBackend, SdpaStep


class LatentNorm(Protocol):
    weight: Tensor  # [latent_size]
    eps: float

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LatentLayer(LayerAttention):
    kv_b: Tensor  # [heads, plain_size + value_size, latent_size]: of each head up_k, then up_v
    norm: LatentNorm  # of the latent


class KeyRotation:
    """The rotation of one head, for any number of them."""

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:  # [max_position, size]: cosines, then sines
        cos, sin = table.chunk(2, dim=-1)
        self._cos, self._sin = torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # two of [num_tokens, 1, size]
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


class LatentBackend(SdpaBackend):
    num_stored = 1

    def __init__(
        self, shape: CacheShape, rotary_tables: Sequence[Tensor], *, latent_size: int, plain_size: int
    ) -> None:
        super().__init__(shape, ())
        self._rotations: Any = [KeyRotation(table, shape.dtype) for table in rotary_tables]
        self._latent_size, self._plain_size = latent_size, plain_size
        self._query_size = plain_size + shape.head_dim - latent_size

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: SdpaStep) -> Tensor:
        """`qkv`: of each token the queries of all heads, then its `new` as for `attend`."""
        assert isinstance(layer, LatentLayer)
        queries, new = qkv.tensor_split((-self.shape.head_dim,), dim=1)
        return self.attend(queries, new, layer, cache, step)

    def attend(self, queries: Tensor, new: Tensor, layer: LatentLayer, cache: LayerCache, step: SdpaStep) -> Tensor:
        """`queries`: of each token those of all heads. `new`: its latent before the norm, and the key to rotate.

        Returns [num_tokens, heads * value_size].
        """
        s = self.shape
        latents, keys = new.tensor_split((self._latent_size,), dim=1)
        latents = layer.norm(latents)
        plain, turned = queries.unflatten(1, (s.num_heads, -1)).split([self._plain_size, self._rotated_size], dim=-1)
        turned = rotate(torch.cat([turned, keys.unsqueeze(1)], dim=1), step.cos_sin[layer.rope])
        queries = torch.cat([plain, turned[:, :-1]], dim=-1)  # [num_tokens, heads, query_size]
        new = torch.cat([latents, turned[:, -1]], dim=-1)  # [num_tokens, head_dim]
        self._store(new, cache.kv, None, step)
        parts = step.parts[None]
        # of all chunks that start at position 0 at once
        made = self._keys_and_values(new, layer) if any(part.pages is None for part in parts) else None
        value_size = layer.kv_b.shape[1] - self._plain_size
        out = torch.empty(len(new), s.num_heads, value_size, dtype=new.dtype, device=new.device)
        for part in parts:
            if part.pages is not None:
                cached, _ = self._gather(cache.kv, part.pages)
                out[part.tokens] = self._absorbed(queries[part.tokens], cached, part, layer)
                continue
            assert made is not None
            q, k, v = (each[part.tokens].transpose(0, 1).unsqueeze(0) for each in (queries, *made))
            own = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
            out[part.tokens] = own[0, ..., :value_size].transpose(0, 1)
        return out.flatten(1)

    @property
    def _rotated_size(self) -> int:
        return self.shape.head_dim - self._latent_size

    def _absorbed(self, queries: Tensor, cached: Tensor, part: Part, layer: LatentLayer) -> Tensor:
        """[num_tokens, heads, value_size]. `cached`: [seqs, 1, length, head_dim]"""
        up_k, up_v = layer.kv_b.tensor_split((self._plain_size,), dim=1)
        plain, turned = queries.tensor_split((self._plain_size,), dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), up_k).transpose(0, 1)  # [num_tokens, heads, latent_size]
        absorbed = torch.cat([absorbed, turned], dim=-1)
        if part.num_new == 1:
            out = attend_rows(absorbed, cached[:, 0], part.mask, layer.scale)
        else:  # one sequence
            shared = cached.expand(-1, self.shape.num_heads, -1, -1)
            # torch's kernels want values as long as keys: what is computed of the rotated key is dropped below
            out = F.scaled_dot_product_attention(
                absorbed.transpose(0, 1).unsqueeze(0), shared, shared, attn_mask=part.mask, scale=layer.scale
            )[0].transpose(0, 1)
        out = out[..., : self._latent_size]  # [num_tokens, heads, latent_size]
        return torch.bmm(out.transpose(0, 1), up_v.transpose(1, 2)).transpose(0, 1)

    def _keys_and_values(self, new: Tensor, layer: LatentLayer) -> tuple[Tensor, Tensor]:
        """Those of all heads, [num_tokens, heads, query_size]; values are padded to the length of keys, if shorter."""
        num_heads = self.shape.num_heads
        latents, turned = new.tensor_split((self._latent_size,), dim=-1)
        up = F.linear(latents, layer.kv_b.flatten(0, 1)).unflatten(1, (num_heads, -1))
        plain, values = up.tensor_split((self._plain_size,), dim=-1)
        keys = torch.cat([plain, turned.unsqueeze(1).expand(-1, num_heads, -1)], dim=-1)
        return keys, F.pad(values, (0, max(self._query_size - values.shape[-1], 0)))


def attend_rows(queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Each sequence's one token attends to [seqs, length, size] keys, which are its values as well.

    `queries` and the result: [seqs, heads, size]. Two products of matrices, which use all of the device where a fused
    kernel would have one program per sequence.
    """
    scores = torch.bmm(queries, keys.transpose(1, 2)).float() * scale
    if mask is not None:  # [seqs, 1, 1, length]
        scores = scores + mask[:, 0]
    return torch.bmm(scores.softmax(dim=-1).to(keys.dtype), keys)
