"""Chooses the attention backend for a model and a device."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.attention.backend import CacheShape
from nanovllm.attention.rotation import rotary_table
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import Config
from nanovllm.layers.spec import AttentionSpec, RopeSpec

if TYPE_CHECKING:
    from nanovllm.attention.interface import AttentionBackend

# Shape of the backend in a model, or a pipeline stage, without attention layers; it is never called
NO_ATTENTION = AttentionSpec(hidden_size=16, num_heads=1, num_kv_heads=1, head_dim=16, rope=RopeSpec(theta=10000.0))


def ropes_of(layers: Sequence[AttentionSpec]) -> tuple[RopeSpec, ...]:
    """The different ones, in the order of the backend's rotary tables."""
    return tuple(dict.fromkeys(layer.rope for layer in layers))


def make_backend(
    config: Config,
    layers: Sequence[AttentionSpec],  # the attention layers of this rank, with the heads that it computes
    *,
    max_position: int,
    dtype: torch.dtype,  # of activations
    cache_dtype: torch.dtype,
    device: torch.device,
) -> "AttentionBackend":
    first = layers[0] if layers else NO_ATTENTION
    same: dict[str, Any] = dict(dtype=dtype, cache_dtype=cache_dtype, device=device)
    if hasattr(first, "make_backend"):  # attention of another kind
        return first.make_backend(config, layers, max_position=max_position, **same)
    if len({(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1:
        from nanovllm.attention.mixed import MixedBackend

        return MixedBackend(layers, ropes_of(layers), partial(make_backend, config, max_position=max_position, **same))
    shape = CacheShape(
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        block_size=config.kv_cache_block_size,
        windows=tuple(layer.window for layer in layers),
        **same,
    )
    table = partial(rotary_table, head_dim=first.head_dim, max_position=max_position, device=device)
    tables = [table(rope) for rope in ropes_of(layers)]
    asked = config.attention_backend == "triton" or config.deterministic or config.kv_cache_dtype == "fp8"
    if device.type != "cpu" or asked:
        from nanovllm.attention.select_kernels import kernel_backend

        if (backend := kernel_backend(config, shape, tables)) is not None:
            return backend
    return SdpaBackend(shape, tables)
