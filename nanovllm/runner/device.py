"""Choices that depend on the machine: device and dtypes."""

import torch

from nanovllm.errors import ConfigError
from nanovllm.weights.dense import cpu_has_bfloat16


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The torch device for `name`; with several ranks, `local_rank` is the index of this rank's GPU on its host."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device here; use device='cpu' or a CUDA build of torch")
    if name == "cpu" or local_rank is None:
        return torch.device(name)
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size, pipeline_parallel_size: rank {local_rank} of this host has no GPU: torch "
            f"sees {torch.cuda.device_count()}; lower the one or the other, or use more hosts"
        )
    return torch.device(name, local_rank)


def resolve_dtype(wanted: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in. `auto` is the checkpoint's, except for a 16-bit checkpoint on a CPU: bfloat16 if the CPU
    has bfloat16 arithmetic, else float32."""
    if wanted == "auto":
        if device.type == "cuda" or checkpoint == "float32":
            return getattr(torch, checkpoint)
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    if device.type == "cpu" and wanted == "float16":
        raise ConfigError(
            "dtype='float16': CPU kernels add up in float16, which is too coarse for real models (SmolLM2 answers "
            "nonsense); use dtype='auto' or 'float32'"
        )
    if device.type == "cpu" and wanted == "bfloat16" and not cpu_has_bfloat16():
        raise ConfigError(
            "dtype='bfloat16': this CPU has no bfloat16 arithmetic and would run some hundred times slower; "
            "use dtype='auto' or 'float32'"
        )
    return getattr(torch, wanted)


def resolve_cache_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache; `auto` is the dtype that the model computes in."""
    if wanted == "fp8":
        return torch.float8_e4m3fn
    return dtype if wanted == "auto" else getattr(torch, wanted)
