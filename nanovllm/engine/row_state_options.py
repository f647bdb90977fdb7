"""Options of models with a state per sequence: the default number of sequences, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.config import AdjustableInt, Config
from nanovllm.distributed.group import Rank
from nanovllm.engine.weight_bytes import weight_bytes
from nanovllm.errors import ConfigError
from nanovllm.models.shard import shard_of
from nanovllm.models.spec import ModelSpec
from nanovllm.row_state import num_checkpoints
from nanovllm.utils.logging import get_logger

if TYPE_CHECKING:
    from nanovllm.engine.proposer import Proposer

# States and checkpoints may take 1/4 of a GPU's memory and half of what the weights leave, or 1/4 of the free memory
# that a CPU may use.
MEMORY_SHARE = 4


def with_row_states(
    config: Config, model: ModelSpec, options: Mapping[str, Any], proposer: "Proposer | None" = None
) -> Config:
    """`config` with fewer sequences if the states of as many would take too much, unless `options` say how many."""
    if proposer is not None and any(model.windows):
        raise ConfigError("a proposer needs a model without windows, or without a state per sequence")
    if not isinstance(options.get("max_num_seqs", AdjustableInt()), AdjustableInt):
        return config
    row_bytes = sum(group.num_bytes for group in model.state_groups() if not group.paged)
    with_checkpoints = row_bytes * (1 + num_checkpoints(config) // config.max_num_seqs)
    most = max(_memory(config, model) // with_checkpoints, 1)
    if most >= config.max_num_seqs:
        return config
    get_logger(__name__).info("max_num_seqs=%d: the state of one takes %.1f MiB", most, row_bytes / 2**20)
    return replace(config, max_num_seqs=most)


def _memory(config: Config, model: ModelSpec) -> int:
    """Bytes that states and checkpoints may take."""
    from nanovllm.runner.device import resolve_device, resolve_dtype
    from nanovllm.runner.memory_budget import available_memory

    device = resolve_device(config.device)
    if device.type == "cpu":
        return int(available_memory() * config.cpu_memory_utilization) // MEMORY_SHARE
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    itemsize = resolve_dtype(config.dtype, model.dtype, device).itemsize
    tensor, pipeline = config.tensor_parallel_size, config.pipeline_parallel_size
    shards = [shard_of(model, Rank(stage * tensor, tensor, pipeline)) for stage in range(pipeline)]
    weights = max(weight_bytes(config, shard, itemsize=itemsize) for shard in shards)
    return min(total // MEMORY_SHARE, (int(total * config.gpu_memory_utilization) - weights) // 2)
