"""Chooses the runner of a rank by its device."""

import torch

from nanovllm.runner.model_runner import ModelRunner


def runner_on(device: torch.device) -> type[ModelRunner]:
    if device.type == "cpu":
        return ModelRunner
    from nanovllm.runner.gpu_runner import GpuRunner

    return GpuRunner
