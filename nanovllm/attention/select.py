"""Chooses the attention backend for a model and a device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nanovllm.attention.backend import CacheShape
from nanovllm.attention.rotation import rotary_table
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.kernels.device import usable
from nanovllm.layers.spec import AttentionSpec, RopeSpec

if TYPE_CHECKING:
    from nanovllm.attention.interface import AttentionBackend

MAX_GROUP = 16  # query heads per KV head that our kernels support
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
    sizes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(sizes) > 1:
        raise ConfigError(f"attention layers of different (heads, KV heads, head_dim) are not implemented: {sizes}")
    shape = CacheShape(
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        block_size=config.kv_cache_block_size,
        windows=tuple(layer.window for layer in layers),
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
    )
    tables = [
        rotary_table(rope, head_dim=first.head_dim, max_position=max_position, device=device)
        for rope in ropes_of(layers)
    ]
    name = config.attention_backend
    obstacle = _obstacle(shape)
    if name == "auto":
        name = "triton" if obstacle is None else "sdpa"
    if name == "triton" and obstacle is not None:
        raise ConfigError(f"attention_backend='triton': {obstacle}; use 'auto' or 'sdpa'")
    if name == "sdpa":
        for option in ("deterministic", "kv_cache_dtype"):
            if getattr(config, option) in (True, "fp8"):
                raise ConfigError(
                    f"{option}={getattr(config, option)!r}: only the triton backend can do this, and "
                    f"{obstacle or 'another was chosen'}"
                )
        return SdpaBackend(shape, tables)
    from nanovllm.attention.triton import TritonBackend
    from nanovllm.kernels.features import dependent_launch

    return TritonBackend(
        shape,
        tables,
        max_num_seqs=config.max_num_seqs,
        deterministic=config.deterministic,
        pdl=dependent_launch(),
    )


def _obstacle(shape: CacheShape) -> str | None:
    """Why our kernels cannot run this model on this device; None if they can."""
    if shape.device.type != "cuda":
        return f"it runs on CUDA devices, not on {shape.device.type}"
    if not usable(shape.device.type):
        return "the triton package is not installed"
    if shape.num_heads // shape.num_kv_heads > MAX_GROUP:
        return f"{shape.num_heads} heads on {shape.num_kv_heads} KV heads are more than {MAX_GROUP} per KV head"
    if shape.head_dim % 16:
        return f"head_dim={shape.head_dim} is not a multiple of 16"
    return None
