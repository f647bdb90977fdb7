"""Runs the model in this process."""

from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.config import Config
from nanovllm.models.spec import ModelSpec
from nanovllm.plan import StepPlan
from nanovllm.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from nanovllm.executor.base import StepHandle


class UniprocExecutor:
    def __init__(self, config: Config, model_config: ModelSpec, path: Path, *, max_model_len: int) -> None:
        self._runner = ModelRunner(config, model_config, path, max_model_len=max_model_len)
        self.num_blocks = self._runner.cache_size.num_blocks
        self.runs_beside_host = self._runner.device.type != "cpu"
        self.startup_seconds = self._runner.phases.seconds

    def launch(self, plan: StepPlan) -> "StepHandle":
        return self._runner.launch(plan)

    def check(self) -> None:
        """Nothing can fail between steps: the model runs in this process."""

    def close(self) -> None:
        self._runner.close()
