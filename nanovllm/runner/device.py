"""Choices that depend on the machine: device, dtype, memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

from nanovllm.errors import ConfigError
from nanovllm.weights.dense import cpu_has_bfloat16

# Process-wide because what it counts is: torch keeps one cuBLAS workspace per stream for the whole process. Holds the
# runners that use a GPU.
_HOLDERS: WeakSet[object] = WeakSet()


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


def hold_memory(holder: object) -> None:
    """Register a user of the GPU, for `release_memory`."""
    _HOLDERS.add(holder)


def release_memory(holder: object) -> None:
    """Return torch's unused GPU memory to the system; to be called once `holder` has dropped its tensors.

    The cuBLAS workspaces are freed with the last holder: the recorded graphs of another one would still use them.
    """
    _HOLDERS.discard(holder)
    if not _HOLDERS:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def out_of_memory_named(device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error of the GPU during the start into one that says which options to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        gib = 2**30
        raise ConfigError(
            f"the GPU ran out of memory at the start ({free / gib:.1f} of {total / gib:.1f} GiB are free now): lower "
            "gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, take a smaller model, or end other "
            f"programs on this GPU. torch said: {str(error).splitlines()[0]}"
        ) from error


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
