"""Makes the runner of a rank; on a CPU with torch alone it is a `ModelRunner`."""

from typing import Any

from nanovllm.runner.model_runner import ModelRunner


def make_runner(config: Any, model: Any, path: Any, *, device: Any, **settings: Any) -> ModelRunner:
    if device.type == "cpu" and config.cpu_kernels == "torch":
        return ModelRunner(config, model, path, device=device, **settings)
    from nanovllm.runner.choose import choose_runner

    return choose_runner(config, model, device, **settings)(config, model, path, device=device, **settings)
