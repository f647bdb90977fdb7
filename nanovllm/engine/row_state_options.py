"""Options of models with a state per sequence: the default number of sequences, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.config import AdjustableInt, Config
from nanovllm.errors import ConfigError
from nanovllm.models.spec import ModelSpec
from nanovllm.row_state import num_checkpoints
from nanovllm.utils.logging import get_logger

if TYPE_CHECKING:
    from nanovllm.engine.proposer import Proposer

MEMORY_SHARE = 4  # states and checkpoints may take 1/4 of a device's memory, or of the free memory that a CPU may use


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
    most = max(_memory(config) // MEMORY_SHARE // with_checkpoints, 1)
    if most >= config.max_num_seqs:
        return config
    get_logger(__name__).info("max_num_seqs=%d: the state of one takes %.1f MiB", most, row_bytes / 2**20)
    return replace(config, max_num_seqs=most)


def _memory(config: Config) -> int:
    """Bytes that the state of sequences might have if there were no weights."""
    from nanovllm.runner.device import resolve_device
    from nanovllm.runner.memory_budget import available_memory

    device = resolve_device(config.device)
    if device.type == "cpu":
        return int(available_memory() * config.cpu_memory_utilization)
    import torch

    return torch.cuda.get_device_properties(device).total_memory
