"""Whether our kernels compute attention, or torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.attention.backend import CacheShape
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.kernels.device import usable
from nanovllm.kernels.features import dependent_launch, gluon_usable

if TYPE_CHECKING:
    from nanovllm.attention.triton import TritonBackend

MAX_HEAD_DIM = 256
MAX_GROUP = 16  # query heads per KV head that our kernels support


def kernel_backend(config: Config, shape: CacheShape, rotary_tables: Sequence[Tensor]) -> "TritonBackend | None":
    """None if torch computes attention; ConfigError if it cannot do what the options ask for."""
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
        return None
    from nanovllm.attention.triton import TritonBackend

    return TritonBackend(
        shape,
        rotary_tables,
        max_num_seqs=config.max_num_seqs,
        deterministic=config.deterministic,
        pdl=dependent_launch(),
        gluon=gluon_usable(),
    )


def _obstacle(shape: CacheShape) -> str | None:
    """Why our kernels cannot run this model on this device; None if they can."""
    if shape.device.type != "cuda":
        return f"it runs on CUDA devices, not on {shape.device.type}"
    if not usable(shape.device.type):
        return "the triton package is not installed"
    if shape.num_heads // shape.num_kv_heads > MAX_GROUP:
        return f"{shape.num_heads} heads on {shape.num_kv_heads} KV heads are more than {MAX_GROUP} per KV head"
    if shape.head_dim > MAX_HEAD_DIM:
        return f"head_dim={shape.head_dim} is above {MAX_HEAD_DIM}"
    if shape.head_dim % 16:
        return f"head_dim={shape.head_dim} is not a multiple of 16"
    return None
