"""How many blocks fit into memory: into a number of bytes that an option gives, or into a share of what is free."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from nanovllm.config import Config
from nanovllm.distributed.group import Parallel
from nanovllm.errors import ConfigError
from nanovllm.models.parameters import widest_activation
from nanovllm.models.shard import Shard
from nanovllm.state import CacheLayout

if TYPE_CHECKING:
    from nanovllm.runner.kv_cache import CacheSize

GIB = 2**30


def cache_bytes(size: "CacheSize") -> int:
    """The bytes of all blocks and rows on this rank."""
    paged = sum(group.num_blocks * each for group, each in zip(size.groups, size.block_bytes, strict=True))
    return paged + size.row_bytes


def fit(
    size: "CacheSize",
    config: Config,
    shard: Shard,
    device: torch.device,
    *,
    weight_bytes: int = 0,
    activation_bytes: int | None = None,
    num_ranks: int = 1,
) -> "CacheSize":
    """`size` with as many blocks as fit into the memory of one rank, which holds `shard`.

    `weight_bytes`: weights that are still to be loaded; 0 if they are in memory already. `activation_bytes`: measured
    with the largest step; None = estimate it. `num_ranks`: of the engine; on a CPU they share one memory.
    """
    budget, reason = _budget(config, shard, device, weight_bytes, activation_bytes, num_ranks)
    layout = size.layout
    if size.row_bytes:
        from nanovllm.row_state import num_states
        from nanovllm.runner.row_states import check_room

        check_room(size.row_bytes // num_states(config), config, num_bytes=budget)
    useful = layout.max_num_seqs * -(-layout.max_model_len // layout.block_size)
    fits = num_blocks_in(budget - size.row_bytes, layout, size.block_bytes)
    num_blocks = useful if fits is None else fits
    if config.kv_cache_memory_bytes is None:
        num_blocks = min(num_blocks, useful)
    if num_blocks < 1 and layout.windows:
        one_block = sum(size.block_bytes)
        raise ConfigError(
            f"no memory for the KV cache: one block of {layout.block_size} tokens takes {one_block / GIB:.3f} GiB, and "
            f"{reason} leaves less; raise it, or lower kv_cache_block_size, max_num_batched_tokens or the model"
        )
    return replace(size, num_blocks=num_blocks, reason=reason)


def fit_all_ranks(
    size: "CacheSize",
    config: Config,
    shard: Shard,
    device: torch.device,
    parallel: Parallel,
    activation_bytes: int,
) -> "CacheSize":
    """`fit`, with the same number of blocks on every rank, each for its own heads and layers."""
    ranks = parallel.rank.world_size
    size = fit(size, config, shard, device, activation_bytes=activation_bytes, num_ranks=ranks)
    if parallel.world is None:
        return size
    return replace(size, num_blocks=parallel.world.smallest(size.num_blocks, device))


def _budget(
    config: Config,
    shard: Shard,
    device: torch.device,
    weight_bytes: int,
    activation_bytes: int | None,
    num_ranks: int,
) -> tuple[int, str]:
    """Bytes for the state of sequences, and where the number comes from."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
    if device.type == "cuda":
        return _gpu_budget(config, shard, device, weight_bytes, activation_bytes)
    share = config.cpu_memory_utilization
    budget = int(max(available_memory() // num_ranks - weight_bytes, 0) * share)
    return budget, f"cpu_memory_utilization={share} of the free memory"


def available_memory() -> int:
    """Bytes of host memory that this process could still allocate, within its control group."""
    with open("/proc/meminfo") as file:
        info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Mem")}
    limits = [info["MemAvailable"]]
    for maximum, current in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if os.path.exists(maximum) and os.path.exists(current):
            with open(maximum) as a, open(current) as b:
                limit, used = a.read().strip(), int(b.read())
            if limit != "max":
                limits.append(max(int(limit) - used, 0))
    return min(limits)


def _gpu_budget(
    config: Config, shard: Shard, device: torch.device, weight_bytes: int, activation_bytes: int | None
) -> tuple[int, str]:
    model = shard.model
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if activation_bytes is None:
        wide = widest_activation(shard) + 4 * model.hidden_size
        activation_bytes = 2 * config.max_num_batched_tokens * wide + 3 * 4 * config.max_num_seqs * model.vocab_size
    # recorded graphs keep the logits and activations of a decode step in their own memory pool
    graph_bytes = 4 * config.max_num_seqs * (model.vocab_size + 16 * model.hidden_size + 2 * widest_activation(shard))
    in_use = total - free  # by all programs
    budget = int(total * config.gpu_memory_utilization) - in_use - activation_bytes - graph_bytes - weight_bytes
    share = (
        f"gpu_memory_utilization={config.gpu_memory_utilization} of {total / GIB:.1f} GiB, {in_use / GIB:.1f} in use, "
        f"{(activation_bytes + graph_bytes) / GIB:.1f} kept for a step"
    )
    return max(budget, 0), share


def num_blocks_in(num_bytes: int, layout: CacheLayout, block_bytes: Sequence[int]) -> int | None:
    """The most blocks of the first group with which all fit into `num_bytes`; None if blocks take no memory.

    `block_bytes`: of a block of each group.
    """
    if not any(block_bytes):
        return None

    def takes(num_blocks: int) -> int:
        groups = layout.groups(num_blocks)
        return sum(group.num_blocks * size for group, size in zip(groups, block_bytes, strict=True))

    low, high = 0, 1
    while takes(high) <= num_bytes:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) <= num_bytes else (low, middle)
    return low
