"""Chooses the executor: this process for one rank, child processes for several, or Ray actors."""

from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.config import Config
from nanovllm.distributed.group import Rank
from nanovllm.models.shard import shard_of
from nanovllm.models.spec import ModelSpec

if TYPE_CHECKING:
    from nanovllm.executor.base import Executor
    from nanovllm.executor.workers import Workers


def make_executor(config: Config, model_config: ModelSpec, path: Path, *, max_model_len: int) -> "Executor":
    rank = Rank(0, config.tensor_parallel_size, config.pipeline_parallel_size)
    shard_of(model_config, rank)  # raises if the model cannot be divided like that, before anything is started
    size = rank.world_size
    backend = config.distributed_executor_backend or ("mp" if size > 1 else None)
    if backend is None:
        from nanovllm.executor.uniproc import UniprocExecutor

        return UniprocExecutor(config, model_config, path, max_model_len=max_model_len)
    from nanovllm.executor.workers import WorkersExecutor

    workers: Workers
    if backend == "ray":
        from nanovllm.executor.ray import RayWorkers

        workers = RayWorkers(size, device=config.device)
    else:
        from nanovllm.executor.multiproc import ProcessWorkers

        workers = ProcessWorkers(size)
    return WorkersExecutor(workers, config, path, max_model_len=max_model_len)
