"""Chooses the workers of an engine: child processes or Ray actors."""

from nanovllm.config import Config
from nanovllm.executor.workers import Workers


def make_workers(config: Config, num_ranks: int) -> Workers:
    if config.distributed_executor_backend == "ray":
        from nanovllm.executor.ray import RayWorkers

        return RayWorkers(num_ranks, device=config.device)
    from nanovllm.executor.multiproc import ProcessWorkers

    return ProcessWorkers(num_ranks)
