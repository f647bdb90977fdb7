"""How much memory a model would take and how many tokens would fit, before anything is loaded."""

from dataclasses import dataclass
from math import prod
from typing import Any

from nanovllm.config import Config
from nanovllm.distributed.group import Place
from nanovllm.layers.spec import Weight
from nanovllm.models.registry import describe
from nanovllm.models.shard import shard_of
from nanovllm.utils.hub import resolve_model

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    model: str
    architecture: str
    device: str
    num_devices: int  # what follows, parameters aside, is of the device that has least room
    dtype: str
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    reason: str  # where the size of the KV cache comes from

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        full = self.num_tokens / self.max_model_len
        return "\n".join(
            [
                f"model       {self.model} ({self.architecture}, {self.num_parameters / 1e6:,.0f}M parameters)",
                f"device      {self.device}, {self.dtype}{self._times()}",
                f"weights     {self.weight_bytes / GIB:.2f} GiB",
                f"KV cache    {self.kv_cache_bytes / GIB:.2f} GiB ({self.reason})",
                f"            {self.num_blocks:,} blocks of {self.block_size} tokens, "
                f"{self.kv_bytes_per_token:,} bytes a token",
                f"fits        {self.num_tokens:,} tokens: {full:,.1f} sequences of max_model_len={self.max_model_len}",
            ]
        )

    def _times(self) -> str:
        return "" if self.num_devices == 1 else f"; {self.num_devices} of them, and of each:"


def make_plan(model: str | None, options: dict[str, Any]) -> MemoryPlan:
    from nanovllm.runner.device import resolve_cache_dtype, resolve_device, resolve_dtype
    from nanovllm.runner.kv_cache import CacheSize, size_kv_cache
    from nanovllm.weights.formats import weight_format

    config = Config.from_options(model, options)
    path = resolve_model(config.model)
    model_config = describe(path).config
    max_model_len = min(config.max_model_len, model_config.max_position)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model_config.dtype, device)
    cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype)
    tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size

    packed = weight_format(config.quantization)

    def of_weight(weight: Weight, shape: tuple[int, ...]) -> int:
        return packed.num_bytes(shape, dtype.itemsize) if weight.packable else prod(shape) * dtype.itemsize

    def of_stage(stage: int) -> tuple[CacheSize, int]:
        shard = shard_of(model_config, Place(stage * tensor, tensor, pipeline))
        num_bytes = shard.num_bytes(of_weight)
        size = size_kv_cache(
            config,
            shard,
            max_model_len=max_model_len,
            dtype=cache_dtype,
            device=device,
            weight_bytes=num_bytes,
            num_ranks=tensor * pipeline,
        )
        return size, num_bytes

    size, num_bytes = min(map(of_stage, range(pipeline)), key=lambda stage: stage[0].num_blocks)
    return MemoryPlan(
        model=path.name,
        architecture=model_config.architecture,
        device=str(device),
        num_devices=tensor * pipeline,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=model_config.num_parameters(),
        weight_bytes=num_bytes,
        kv_bytes_per_token=size.block_bytes // size.block_size,
        kv_cache_bytes=size.num_bytes,
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        max_model_len=max_model_len,
        reason=size.reason,
    )
