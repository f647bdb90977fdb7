"""Chooses the attention backend for a model and a device."""

from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, CacheShape
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.kernels.device import dependent_launch, usable

MAX_GROUP = 16  # query heads per KV head that our kernels support


def make_backend(config: Config, shape: CacheShape, rotary_table: Tensor) -> AttentionBackend:
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
        return SdpaBackend(shape, rotary_table)
    from nanovllm.attention.triton import TritonBackend

    return TritonBackend(
        shape,
        rotary_table,
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
