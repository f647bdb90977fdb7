"""Computes how much memory a model needs and how many tokens fit, without loading it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.config import Config
from nanovllm.distributed.group import Rank
from nanovllm.engine.row_state_options import with_row_states
from nanovllm.engine.weight_bytes import weight_bytes
from nanovllm.models.parameters import num_parameters
from nanovllm.models.registry import describe
from nanovllm.models.shard import shard_of
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.hub import resolve_model

if TYPE_CHECKING:
    import torch

    from nanovllm.runner.kv_cache import CacheSize

GIB = 2**30


CpuKernels = Literal["native", "native products", "torch"]


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Layers that keep the same tokens of a sequence in blocks of their own."""

    num_layers: int  # of the whole model
    window: int | None  # tokens that are kept of a sequence; None = all
    num_blocks: int
    bytes_per_token: int
    max_sequences: float  # of max_model_len, that fit into the blocks

    def __str__(self) -> str:
        kept = "all tokens" if self.window is None else f"a window of {self.window:,} tokens"
        return (
            f"{self.num_layers} layers keep {kept}: {self.num_blocks:,} blocks, {self.bytes_per_token:,} bytes per "
            f"token, {self.max_sequences:,.1f} sequences"
        )


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    model: str
    architecture: str
    device: str
    num_devices: int  # the memory below is that of the device with the least room
    dtype: str
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int  # of all layers
    kv_cache_bytes: int  # blocks and states per row
    row_state_bytes: int  # the part of it for layers that keep one state per running sequence, checkpoints included
    num_blocks: int  # of the first group
    block_size: int
    groups: tuple[GroupPlan, ...]
    max_model_len: int
    reason: str  # where the size of the KV cache comes from

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_sequences(self) -> float:
        """How many sequences of max_model_len tokens fit into the blocks."""
        return min((group.max_sequences for group in self.groups), default=float("inf"))

    def __str__(self) -> str:
        return "\n".join(
            [
                f"model       {self.model} ({self.architecture}, {self.num_parameters / 1e6:,.0f}M parameters)",
                f"device      {self.device}, {self.dtype}{self._times()}",
                f"weights     {self.weight_bytes / GIB:.2f} GiB",
                f"KV cache    {self.kv_cache_bytes / GIB:.2f} GiB ({self.reason})",
                f"            {self.num_blocks:,} blocks of {self.block_size} tokens, "
                f"{self.kv_bytes_per_token:,} bytes per token",
                *self._group_lines(),
                f"fits        {self.num_tokens:,} tokens: {self.max_sequences:,.1f} sequences of "
                f"max_model_len={self.max_model_len}",
            ]
        )

    def _group_lines(self) -> list[str]:
        """What the groups of layers keep, unless all layers keep all tokens."""
        lines = []
        if len(self.groups) > 1 or any(group.window is not None for group in self.groups):
            lines = [f"            {group}" for group in self.groups]
        if self.row_state_bytes:
            size = self.row_state_bytes / GIB
            lines.append(f"            {size:.2f} GiB for states per running sequence and their checkpoints")
        return lines

    def _times(self) -> str:
        return "" if self.num_devices == 1 else f"; {self.num_devices} devices, with on each of them:"


def _group_plans(model: ModelSpec, size: "CacheSize") -> tuple[GroupPlan, ...]:
    num_layers = {group.window: len(group.layers) for group in model.state_groups() if group.paged}
    return tuple(
        GroupPlan(
            num_layers=num_layers[group.window],
            window=group.window,
            num_blocks=group.num_blocks,
            bytes_per_token=block_bytes // size.layout.block_size,
            max_sequences=group.num_blocks / size.layout.blocks_needed(group.window),
        )
        for group, block_bytes in zip(size.groups, size.block_bytes, strict=True)
    )


def cpu_kernels(config: Config, model: ModelSpec, device: "torch.device", *, max_model_len: int) -> CpuKernels:
    """What computes the model on a CPU where the native library can be built; elsewhere "torch"."""
    from nanovllm.native.support import reason_against, reason_against_products

    if device.type != "cpu" or config.cpu_kernels == "torch":
        return "torch"
    if reason_against(config, model, max_model_len=max_model_len) is None:
        return "native"
    return "native products" if reason_against_products(config, model) is None else "torch"


def make_plan(model: str | None, options: dict[str, Any]) -> MemoryPlan:
    import torch

    from nanovllm.native.support import cache_dtype as native_cache_dtype
    from nanovllm.runner.device import resolve_cache_dtype, resolve_device, resolve_dtype
    from nanovllm.runner.kv_cache import size_kv_cache
    from nanovllm.runner.memory_budget import cache_bytes, fit

    config = Config.from_options(model, options)
    path = resolve_model(config.model)
    model_config = describe(path).config
    if model_config.keeps_row_state:
        config = with_row_states(config, model_config, options)
    max_model_len = min(config.max_model_len, model_config.max_position)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model_config.dtype, device)
    kernels = cpu_kernels(config, model_config, device, max_model_len=max_model_len)
    computed = dtype if kernels == "torch" else torch.float32
    wanted = native_cache_dtype(config, model_config) if kernels == "native" else config.kv_cache_dtype
    cache_dtype = resolve_cache_dtype(wanted, computed)
    tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size

    def of_stage(stage: int) -> "tuple[CacheSize, int]":
        shard = shard_of(model_config, Rank(stage * tensor, tensor, pipeline))
        own_bytes = weight_bytes(config, shard, itemsize=dtype.itemsize)
        has_weights = path.is_file() or any(path.glob("*.safetensors"))
        if kernels != "torch" and has_weights and config.load_format != "dummy":
            from nanovllm.runner.native_plan import products_weight_bytes, step_weight_bytes

            of_weights = step_weight_bytes if kernels == "native" else products_weight_bytes
            own_bytes = of_weights(config, model_config, path)
        size = size_kv_cache(config, shard, max_model_len=max_model_len, dtype=cache_dtype)
        if config.num_kv_cache_blocks == -1:
            size = fit(size, config, shard, device, weight_bytes=own_bytes, num_ranks=tensor * pipeline)
        return size, own_bytes

    size, stage_bytes = min(map(of_stage, range(pipeline)), key=lambda stage: stage[0].num_blocks)
    return MemoryPlan(
        model=path.name,
        architecture=model_config.architecture,
        device=str(device),
        num_devices=tensor * pipeline,
        dtype=str(computed).removeprefix("torch."),
        num_parameters=num_parameters(model_config),
        weight_bytes=stage_bytes,
        kv_bytes_per_token=sum(size.block_bytes) // size.layout.block_size,
        kv_cache_bytes=cache_bytes(size),
        row_state_bytes=size.row_bytes,
        num_blocks=size.num_blocks,
        block_size=size.layout.block_size,
        groups=_group_plans(model_config, size),
        max_model_len=max_model_len,
        reason=size.reason,
    )
