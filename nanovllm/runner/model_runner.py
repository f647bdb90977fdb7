"""The device side of the engine: builds model, KV cache, request table and sampler, and launches steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.attention.select import make_backend, ropes_of
from nanovllm.checkpoint.dummy import load_dummy
from nanovllm.config import Config
from nanovllm.distributed.group import Parallel
from nanovllm.layers.context import BuildContext
from nanovllm.layers.spec import AttentionSpec
from nanovllm.models.decoder import Decoder
from nanovllm.models.shard import shard_of
from nanovllm.models.spec import ModelSpec
from nanovllm.plan import StepPlan
from nanovllm.runner.device import resolve_cache_dtype, resolve_dtype
from nanovllm.runner.forward_batch import ForwardBatch, build_batch, step_capacity
from nanovllm.runner.kv_cache import make_states, size_kv_cache
from nanovllm.runner.phases import Phases
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.results import PendingStep
from nanovllm.runner.sampling import Sampling
from nanovllm.runner.stage import Stage
from nanovllm.runner.upload import Upload
from nanovllm.weights.formats import WeightFormats, weight_formats

if TYPE_CHECKING:
    from nanovllm.runner.guided_step import GuidedStep
    from nanovllm.runner.prompt_outputs import PromptOutputs
    from nanovllm.runner.row_states import RowStates

ALL_IN_ONE = Parallel()


class ModelRunner:
    """Implements `Executor` for one rank, on torch alone; with several ranks each has one. `GpuRunner` adds kernels."""

    runs_beside_host = False
    states: list[Any]  # of the layers
    _row_states: "RowStates | None" = None  # if layers keep such

    @torch.inference_mode()
    def __init__(
        self,
        config: Config,
        model_config: ModelSpec,
        path: Path,
        *,
        device: torch.device,
        max_model_len: int,
        parallel: Parallel = ALL_IN_ONE,
    ) -> None:
        """All ranks of `parallel` get the same plans in the same order and have the same tokens after each."""
        self._parallel, self.device = parallel, device
        self.phases = Phases(self.device)
        self.startup_seconds = self.phases.seconds
        with self.phases.timed("model"):
            self._build_model(config, model_config, max_model_len)
            self._build_steps(config, model_config, max_model_len)
        self._load(config, path)
        with self.phases.timed("warm_up"):
            activation_bytes = self._activation_bytes()
        with self.phases.timed("kv_cache"):
            self.states, self._row_states = [], None  # frees those of the warm-up
            shard, dtype = self.model.shard, self.backend.shape.cache_dtype
            self.cache_size = size_kv_cache(config, shard, max_model_len=max_model_len, dtype=dtype)
            if config.num_kv_cache_blocks == -1:
                from nanovllm.runner.memory_budget import fit_all_ranks

                self.cache_size = fit_all_ranks(self.cache_size, config, shard, device, parallel, activation_bytes)
            self.num_blocks = self.cache_size.num_blocks
            self._make_states({group.window: group.num_blocks for group in self.cache_size.groups})

    def _build_model(self, config: Config, model_config: ModelSpec, max_model_len: int) -> None:
        dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        shard = shard_of(model_config, self._parallel.rank)
        attention = [layer.mixer for layer in shard.layer_specs if isinstance(layer.mixer, AttentionSpec)]
        self.backend = make_backend(
            config,
            [spec.on_ranks(shard.tensor_parallel_size) for spec in attention],
            max_position=max_model_len,
            dtype=dtype,
            cache_dtype=resolve_cache_dtype(config.kv_cache_dtype, dtype),
            device=self.device,
        )
        self._context = BuildContext.on(
            self.device,
            dtype=dtype,
            attention=self.backend,
            ropes=ropes_of(attention),
            group=self._parallel.tensor,
            deterministic=config.deterministic,
            weight_formats=self._weight_formats(config, model_config),
        )
        decoder = Decoder
        if model_config.per_layer is not None:
            from nanovllm.models.per_layer import PerLayerDecoder as decoder
        self.model = decoder(shard, self._context)

    def _weight_formats(self, config: Config, model_config: ModelSpec) -> WeightFormats:
        return weight_formats(config.quantization, model_config.packing, dummy=config.load_format == "dummy")

    def _build_steps(self, config: Config, model_config: ModelSpec, max_model_len: int) -> None:
        """Build what runs the steps of the model."""
        context = self._context
        capacity = step_capacity(max_num_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs)
        self.table = self._make_table(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.kv_cache_block_size,
            upload=Upload(capacity=capacity, device=self.device),
            windows=model_config.windows,
        )
        self._stage = Stage(self.model, context)
        if self._parallel.rank.world_size > 1:
            from nanovllm.runner.pipeline_stage import PipelineStage

            self._stage = PipelineStage(self.model, context, self._parallel)
        self._config, self._keeps_row_state = config, model_config.keeps_row_state
        self._prompt_outputs: PromptOutputs | None = None  # made when first needed
        self._sampling = Sampling(self._stage, self.table)

    def _make_table(self, **sizes: Any) -> RequestTable:
        return RequestTable(**sizes)

    def _load(self, config: Config, path: Path) -> None:
        slots, dtype = self.model.slots(), self._context.dtype
        with self.phases.timed("weights"):
            if config.load_format == "dummy":
                load_dummy(slots, config.seed, dtype=dtype, device=self.device)
            else:
                from nanovllm.checkpoint.loader import load_checkpoint
                from nanovllm.models.parameters import tensor_names

                load_checkpoint(
                    path,
                    config.load_format,
                    slots,
                    dtype=dtype,
                    packing=self.model.spec.packing,
                    names=self.model.spec.file_names,
                    is_elsewhere=tensor_names(self.model.spec).__contains__,
                    shows_progress=self._parallel.rank.index == 0,  # the other ranks are about as far
                )
            self.model.finish_loading()

    def _make_states(self, num_blocks: dict[int | None, int]) -> list[Any]:
        """Make the states of all layers. `num_blocks`: of each paged group, by its window."""
        states = self.model.shard.layer_states(str(self.backend.shape.cache_dtype).removeprefix("torch."))
        if self._keeps_row_state:
            from nanovllm.runner.row_states import RowStates

            self.states, self._row_states = [], None
            self._row_states = RowStates(states, self._config, device=self.device)
        rows = () if self._row_states is None else self._row_states.layers
        self.states = make_states(states, self.backend, num_blocks, rows)
        return self.states

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "PendingStep | GuidedStep":
        self.table.apply(plan)
        if self._row_states is not None:
            self._row_states.apply(plan)
        if plan.new_rows:
            self._sampling.forget()
        return self._run(plan)

    def _run(self, plan: StepPlan) -> "PendingStep | GuidedStep":
        positions = plan.sampled_positions()
        sizes: Any = {"head_size": self._head_size(len(positions)), "keeps_row_state": self._keeps_row_state}
        batch = self.table.send(partial(build_batch, plan, self.table, self._prepare(plan), **sizes))
        needs_all = any(step.pooling is not None or step.num_prompt_logprobs is not None for step in plan.row_steps)
        hidden = self._forward(batch, None if needs_all else batch.logits_rows)
        prompts = None
        if needs_all:
            prompts = self._outputs_of_prompts().compute(plan, batch, hidden)
            if hidden is not None and batch.logits_rows is not None:
                hidden = hidden[batch.logits_rows]
        if batch.sampled_rows is None:
            return PendingStep(None, None, self.device, prompts=prompts)
        logits = self._stage.logits(hidden)
        if logits is not None:
            logits = logits[: len(positions)]
        sampling = self._sampling.batch_of(positions)
        sampled_rows, verification = batch.sampled_rows, batch.verification

        def finish(masks: Mapping[int, Sequence[bytes]]) -> PendingStep:
            tokens, scores = self._sampling.draw(logits, sampling, sampled_rows, masks, verification)
            self.table.advance(sampling.host_rows if verification is None else verification.rows_with_one_token())
            return PendingStep(tokens, scores, self.device, verification=verification, prompts=prompts)

        if not plan.guided_rows:
            return finish({})
        from nanovllm.runner.guided_step import GuidedStep

        return GuidedStep(finish)

    def _prepare(self, plan: StepPlan) -> Callable[..., Any]:
        return self.backend.prepare

    def _forward(self, batch: ForwardBatch, wanted: torch.Tensor | None) -> torch.Tensor | None:
        x = self._stage.inputs(self.table.tokens, batch.rows, batch.positions)
        return self._stage.forward(x, self.states, batch.step, wanted)

    def _head_size(self, num_sampled: int) -> int:
        """The number of rows that get logits, with padding."""
        return num_sampled

    def _activation_bytes(self) -> int:
        """The bytes that the largest step takes. On a CPU the KV cache gets only a share of what is free."""
        return 0

    def _outputs_of_prompts(self) -> "PromptOutputs":
        if self._prompt_outputs is None:
            from nanovllm.runner.prompt_outputs import PromptOutputs

            self._prompt_outputs = PromptOutputs(self._stage, self.table, device=self.device)
        return self._prompt_outputs

    def idle_work(self) -> Iterator[None]:
        return iter(())

    def check(self) -> None:
        """Nothing can fail between steps: the model runs in this process."""

    def close(self) -> None:
        del self._stage, self.model, self.states, self.table, self.backend, self._context, self._sampling
        self._prompt_outputs = self._row_states = None
