"""The runner of a GPU: our kernels, decode steps as CUDA graphs, and a start that compiles and measures."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.models.spec import ModelSpec
from nanovllm.plan import StepPlan
from nanovllm.runner.forward_batch import ForwardBatch
from nanovllm.runner.gpu_memory import release_memory, starting_on_gpu
from nanovllm.runner.gpu_start import GpuStart
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.request_table import RequestTable

if TYPE_CHECKING:  # imports Triton, which may not be installed
    from nanovllm.runner.decode_step import DecodeStep
    from nanovllm.runner.guided_step import GuidedStep
    from nanovllm.runner.kernel_table import KernelTable
    from nanovllm.runner.prompt_graphs import PromptGraphs
    from nanovllm.runner.results import PendingStep


class GpuRunner(ModelRunner):
    runs_beside_host = True

    def __init__(
        self, config: Config, model_config: ModelSpec, path: Path, *, device: torch.device, **settings: Any
    ) -> None:
        with starting_on_gpu(self, device):
            super().__init__(config, model_config, path, device=device, **settings)
        del self._gpu_start

    def _make_table(self, **sizes: Any) -> RequestTable:
        if not self._context.kernels:
            return super()._make_table(**sizes)
        from nanovllm.runner.kernel_table import KernelTable

        return KernelTable(**sizes)

    def _build_steps(self, config: Config, model_config: ModelSpec, max_model_len: int) -> None:
        super()._build_steps(config, model_config, max_model_len)
        self._max_num_tokens = config.max_num_batched_tokens
        self._decode: DecodeStep | None = None
        self._prompt_graphs: PromptGraphs | None = None
        if self._context.kernels:
            from nanovllm.runner.kernel_steps import make_kernel_steps

            table, keeps_row_state = cast("KernelTable", self.table), model_config.keeps_row_state
            self._sampling, self._decode, self._prompt_graphs = make_kernel_steps(
                config, self._context, self._stage, table, keeps_row_state=keeps_row_state
            )
        self._gpu_start = GpuStart(
            config,
            self._context,
            table=self.table,
            phases=self.phases,
            decode=self._decode,
            launch=self.launch,
            small_cache=lambda: self._make_states(dict.fromkeys(self.table.blocks, 1)),
        )

    def _load(self, config: Config, path: Path) -> None:
        with self._gpu_start.kernels_compiled(num_ranks=self._parallel.rank.world_size):
            super()._load(config, path)

    def _activation_bytes(self) -> int:
        return self._gpu_start.activation_bytes(vocab_size=self.model.spec.vocab_size)

    def _run(self, plan: StepPlan) -> "PendingStep | GuidedStep":
        if self._decode is not None and not plan.row_steps:
            return self._decode.launch(plan, self.states)
        return super()._run(plan)

    def _prepare(self, plan: StepPlan) -> Callable[..., Any]:
        graphs = self._prompt_graphs
        if graphs is None or (size := graphs.size_for(plan)) is None:
            return super()._prepare(plan)
        return partial(graphs.prepare, size)

    def _forward(self, batch: ForwardBatch, wanted: Tensor | None) -> Tensor | None:
        if self._prompt_graphs is not None and self._prompt_graphs.has_prepared(batch):
            return self._prompt_graphs.forward(batch, self.states, wanted)
        return super()._forward(batch, wanted)

    def _head_size(self, num_sampled: int) -> int:
        """The size of the decode graph for as many rows: with a size that it has not seen cuBLAS may load another
        kernel, which waits until the device is idle."""
        return num_sampled if self._decode is None else self._decode.size_for(num_sampled)

    def idle_work(self) -> Iterator[None]:
        if not self._context.kernels:
            return iter(())
        from nanovllm.runner.idle_work import idle_work

        return idle_work(
            self.model, self._decode, self._prompt_graphs, self.states, max_num_tokens=self._max_num_tokens
        )

    def close(self) -> None:
        if self._decode is not None:
            self._decode.close()
        super().close()
        del self._decode, self._prompt_graphs
        release_memory(self)
