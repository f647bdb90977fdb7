"""How many blocks the KV cache gets."""

from dataclasses import dataclass, replace

import torch

from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.errors import ConfigError
from nanovllm.models.shard import Shard
from nanovllm.runner.device import available_memory

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    num_blocks: int
    block_size: int
    block_bytes: int
    reason: str  # where the number comes from, for people

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def size_kv_cache(
    config: Config,
    shard: Shard,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    weight_bytes: int = 0,
    activation_bytes: int | None = None,
    num_ranks: int = 1,
) -> CacheSize:
    """`shard`: what one rank holds of the model. `num_ranks`: of the engine; on a CPU they divide one memory.

    `weight_bytes`: what is still to be loaded; 0 once the weights are in memory.

    `activation_bytes`: what the largest step was seen to take; None = estimate it.
    """
    block_size = config.kv_cache_block_size
    block_bytes = shard.kv_bytes_per_token(str(dtype).removeprefix("torch.")) * block_size
    if config.num_kv_cache_blocks != -1:
        num_blocks, reason = config.num_kv_cache_blocks, f"num_kv_cache_blocks={config.num_kv_cache_blocks}"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
        reason = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
    else:
        if device.type == "cuda":
            budget, reason = _gpu_budget(config, shard, device, weight_bytes, activation_bytes)
        else:
            share = config.cpu_memory_utilization
            budget = int(max(available_memory() // num_ranks - weight_bytes, 0) * share)
            reason = f"cpu_memory_utilization={share} of the free memory"
        useful = config.max_num_seqs * -(-max_model_len // block_size)
        num_blocks = min(budget // block_bytes, useful)
    if num_blocks < 1:
        raise ConfigError(
            f"no memory for the KV cache: one block of {block_size} tokens takes {block_bytes / GIB:.3f} GiB, and "
            f"{reason} leaves less; raise it, or lower kv_cache_block_size, max_num_batched_tokens or the model"
        )
    return CacheSize(num_blocks=num_blocks, block_size=block_size, block_bytes=block_bytes, reason=reason)


def smallest(size: CacheSize, world: Group, device: torch.device) -> CacheSize:
    """What every rank has room for: they all store the same blocks, each its own heads and layers of them."""
    if world.size == 1:
        return size
    everyone = world.all_gather(torch.tensor([size.num_blocks], device=device))
    return replace(size, num_blocks=int(everyone.min()))


def _gpu_budget(
    config: Config, shard: Shard, device: torch.device, weight_bytes: int, activation_bytes: int | None
) -> tuple[int, str]:
    model = shard.model
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if activation_bytes is None:
        wide = shard.widest_activation() + 4 * model.hidden_size
        activation_bytes = 2 * config.max_num_batched_tokens * wide + 3 * 4 * config.max_num_seqs * model.vocab_size
    # recorded graphs keep a decode step's logits and activations in a pool of their own
    graph_bytes = 4 * config.max_num_seqs * (model.vocab_size + 16 * model.hidden_size + 2 * shard.widest_activation())
    in_use = total - free  # by anyone
    budget = int(total * config.gpu_memory_utilization) - in_use - activation_bytes - graph_bytes - weight_bytes
    share = (
        f"gpu_memory_utilization={config.gpu_memory_utilization} of {total / GIB:.1f} GiB, {in_use / GIB:.1f} in use, "
        f"{(activation_bytes + graph_bytes) / GIB:.1f} kept for a step"
    )
    return max(budget, 0), share
