"""Attention with sinks on torch: each head has a logit that takes part in the softmax and whose value is zero.

A softmax over the keys alone gives the result and the logarithm of its denominator (lse). With a sink, the keys keep
the share exp(lse) / (exp(lse) + exp(sink)) of the weight, which is sigmoid(lse - sink).
"""

import torch
from torch import Tensor

from nanovllm.attention.backend import CacheShape


def attend_with_sinks(
    qkv: Tensor,  # [seqs * num_new, heads + 2 * kv_heads, head_dim]
    cached: tuple[Tensor, Tensor] | None,  # [seqs, kv_heads, length, head_dim] each; None = one sequence's own keys
    shape: CacheShape,
    *,
    mask: Tensor | None,  # [seqs, 1, num_new, length]; None = causal
    scale: float,
    sinks: Tensor,  # [heads]
) -> Tensor:  # [seqs * num_new, heads * head_dim]
    heads = qkv.transpose(0, 1).unsqueeze(0)
    queries, keys, values = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if cached is not None:
        keys, values = cached
        queries = qkv[:, : shape.num_heads].unflatten(0, (keys.shape[0], -1)).transpose(1, 2)
    group = shape.num_heads // shape.num_kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    out, lse = _attend(queries, keys, values, mask, scale)  # [seqs, heads, num_new, head_dim], without the last
    share = torch.sigmoid(lse - sinks.float()[:, None]).unsqueeze(-1)
    return (out * share.to(out.dtype)).transpose(1, 2).reshape(qkv.shape[0], -1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The result of the softmax over the keys, and the logarithm of its denominator."""
    num_new, length = queries.shape[2], keys.shape[2]
    causal = mask is None and num_new > 1
    if queries.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(queries, keys, values, is_causal=causal, attn_mask=mask, scale=scale)
    scores = (queries @ keys.transpose(-1, -2)).float() * scale
    if causal:
        later = torch.ones(num_new, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    scores = scores if mask is None else scores + mask
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(-1)).exp().to(values.dtype) @ values, lse
