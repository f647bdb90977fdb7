"""Chooses a GPU of this host, or says why there is none."""

import torch

from nanovllm.errors import ConfigError


def gpu_device(local_rank: int | None = None) -> torch.device:
    """The torch device; with several ranks, `local_rank` is the index of this rank's GPU on its host."""
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device here; use device='cpu' or a CUDA build of torch")
    if local_rank is None:
        return torch.device("cuda")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size, pipeline_parallel_size: rank {local_rank} of this host has no GPU: torch "
            f"sees {torch.cuda.device_count()}; lower the one or the other, or use more hosts"
        )
    return torch.device("cuda", local_rank)
