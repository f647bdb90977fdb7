"""Whether our kernels compute latent attention (MLA), or torch."""

from collections.abc import Sequence

import torch

from nanovllm.attention.backend import CacheShape
from nanovllm.attention.latent import LatentBackend
from nanovllm.attention.rotation import rotary_table
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.kernels.device import usable
from nanovllm.layers.spec import AttentionSpec


def make_latent_backend(
    config: Config,
    layers: Sequence[AttentionSpec],  # with one KV head: the latent and the rotated key
    *,
    latent_size: int,
    plain_size: int,  # numbers of a head's query that are not rotated
    max_position: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> LatentBackend:
    for option, value in (("deterministic", True), ("kv_cache_dtype", "fp8")):
        if getattr(config, option) == value:
            raise ConfigError(f"{option}={value!r} is not implemented for latent attention (MLA)")
    first, kernels_run = layers[0], usable(device.type)
    if config.attention_backend == "triton" and not kernels_run:
        raise ConfigError("attention_backend='triton': there is no CUDA device with Triton; use 'auto' or 'sdpa'")
    shape = CacheShape(
        num_heads=first.num_heads,
        num_kv_heads=1,
        head_dim=first.head_dim,
        block_size=config.kv_cache_block_size,
        windows=(None,) * len(layers),
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
    )
    rotated_size = first.head_dim - latent_size
    ropes = dict.fromkeys(layer.rope for layer in layers)
    tables = [rotary_table(rope, head_dim=rotated_size, max_position=max_position, device=device) for rope in ropes]
    kind = LatentBackend
    if kernels_run and config.attention_backend != "sdpa":
        from nanovllm.attention.latent_kernels import LatentKernelBackend as kind
    return kind(shape, tables, latent_size=latent_size, plain_size=plain_size)
