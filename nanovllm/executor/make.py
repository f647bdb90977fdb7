"""Chooses the executor: the model in this process for one rank, or workers."""

from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.config import Config
from nanovllm.distributed.group import Rank
from nanovllm.models.shard import shard_of
from nanovllm.models.spec import ModelSpec

if TYPE_CHECKING:
    from nanovllm.executor.base import Executor


def make_executor(config: Config, model_config: ModelSpec, path: Path, *, max_model_len: int) -> "Executor":
    rank = Rank(0, config.tensor_parallel_size, config.pipeline_parallel_size)
    shard_of(model_config, rank)  # raises if the model cannot be divided like that, before anything is started
    if rank.world_size == 1 and config.distributed_executor_backend is None:
        from nanovllm.runner.device import resolve_device
        from nanovllm.runner.make import make_runner

        device = resolve_device(config.device)
        return make_runner(config, model_config, path, device=device, max_model_len=max_model_len)
    from nanovllm.executor.make_workers import make_workers
    from nanovllm.executor.workers import WorkersExecutor

    return WorkersExecutor(make_workers(config, rank.world_size), config, path, max_model_len=max_model_len)
