"""Chooses the runner by device and model: kernels on a GPU, the native step on a CPU, or torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.models.spec import ModelSpec
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)


def choose_runner(
    config: Config, model: ModelSpec, device: torch.device, *, max_model_len: int, **settings: Any
) -> Callable[..., ModelRunner]:
    if device.type == "cpu":
        return _on_cpu(config, model, max_model_len)
    if config.cpu_kernels == "native":
        raise ConfigError(f"cpu_kernels='native': the device is {device.type}")
    from nanovllm.runner.gpu_runner import GpuRunner

    return GpuRunner


def _on_cpu(config: Config, model: ModelSpec, max_model_len: int) -> Callable[..., ModelRunner]:
    """torch where the native step cannot run, after a log line that says why; ConfigError if the options ask for it."""
    from nanovllm.native.build import library
    from nanovllm.native.support import reason_against
    from nanovllm.runner.native_runner import NativeRunner

    reason = reason_against(config, model, max_model_len=max_model_len)
    built = library() if reason is None else None  # it logs why there is none
    if built is not None:
        return partial(NativeRunner, built)
    if config.cpu_kernels == "native":
        raise ConfigError(f"cpu_kernels='native': {reason or 'the library could not be built; the log says why'}")
    if reason is not None:
        logger.info("torch computes this model, and not the faster native step: %s", reason)
    return ModelRunner
