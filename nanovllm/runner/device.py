"""Choices that depend on the machine: device and dtypes."""

import torch

from nanovllm.weights.dense import cpu_has_bfloat16


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The torch device for `name`; with several ranks, `local_rank` is the index of this rank's GPU on its host."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    from nanovllm.runner.gpu_device import gpu_device

    return gpu_device(local_rank)


def resolve_dtype(wanted: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in. `auto` is the checkpoint's, except for a 16-bit checkpoint on a CPU: bfloat16 if the CPU
    has bfloat16 arithmetic, else float32."""
    if wanted == "auto":
        if device.type == "cuda" or checkpoint == "float32":
            return getattr(torch, checkpoint)
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    if device.type == "cpu" and wanted != "float32":
        from nanovllm.runner.cpu_16_bit import check_16_bit

        check_16_bit(wanted, has_bfloat16=cpu_has_bfloat16())
    return getattr(torch, wanted)


def resolve_cache_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache; `auto` is the dtype that the model computes in."""
    if wanted == "fp8":
        return torch.float8_e4m3fn
    return dtype if wanted == "auto" else getattr(torch, wanted)
