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
    """torch where the native step cannot run, with native products where these can, after a log line that says why;
    ConfigError if the options ask for the step."""
    from nanovllm.native.build import library
    from nanovllm.native.support import reason_against, reason_against_products

    reason = reason_against(config, model, max_model_len=max_model_len)
    multiplies = reason_against_products(config, model) is None
    if reason is not None and config.cpu_kernels == "native":
        raise ConfigError(f"cpu_kernels='native': {reason}")
    built = library() if reason is None or multiplies else None  # it logs why there is none
    if reason is None and built is not None:
        from nanovllm.runner.native_runner import NativeRunner

        return partial(NativeRunner, built)
    if config.cpu_kernels == "native":
        raise ConfigError("cpu_kernels='native': the library could not be built; the log says why")
    if built is not None:
        from nanovllm.runner.native_products import NativeProductsRunner

        logger.info("torch computes this model with native products, and not the faster native step: %s", reason)
        return partial(NativeProductsRunner, built)
    if reason is not None:
        logger.info("torch computes this model, and not the faster native step: %s", reason)
    return ModelRunner
