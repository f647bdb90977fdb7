"""The device side of the engine: builds model, KV cache, request table and sampler, and launches steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

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
from nanovllm.runner.device import (
    hold_memory,
    out_of_memory_named,
    release_memory,
    resolve_cache_dtype,
    resolve_device,
    resolve_dtype,
)
from nanovllm.runner.forward_batch import ForwardBatch, build_batch, extra_capacity, step_capacity
from nanovllm.runner.kv_cache import make_states, size_kv_cache, smallest
from nanovllm.runner.phases import Phases
from nanovllm.runner.pipeline_stage import PipelineStage
from nanovllm.runner.request_table import RequestTable, SampledPositions
from nanovllm.runner.results import GuidedStep, PendingStep
from nanovllm.runner.row_states import RowStateCopies
from nanovllm.runner.sampling import Drawn, Sampler, SamplingBatch, draw, make_batch
from nanovllm.runner.upload import Upload
from nanovllm.weights.formats import weight_format

if TYPE_CHECKING:
    from nanovllm.attention.device_backend import DeviceBackend
    from nanovllm.runner.decode_step import DecodeStep
    from nanovllm.runner.kernel_sampler import KernelSampler
    from nanovllm.runner.pooling import Pooler

Sent = TypeVar("Sent")
ALL_IN_ONE = Parallel.alone()


class ModelRunner:
    @torch.inference_mode()
    def __init__(
        self,
        config: Config,
        model_config: ModelSpec,
        path: Path,
        *,
        max_model_len: int,
        parallel: Parallel = ALL_IN_ONE,
    ) -> None:
        """All ranks of `parallel` get the same plans in the same order and have the same tokens after each."""
        self._parallel, rank = parallel, parallel.rank
        self.returns_result = rank.returns_result
        self.device = resolve_device(config.device, rank.local_rank if rank.world_size > 1 else None)
        if self.device.type == "cuda":
            hold_memory(self)
            if self.device.index is not None:
                torch.cuda.set_device(self.device)
        self.vocab_size = model_config.vocab_size
        self.phases = Phases(self.device)
        with out_of_memory_named(self.device):
            with self.phases.timed("model"):
                self._build(config, model_config, max_model_len)
            with self._kernels_compiled(config), self.phases.timed("weights"):
                self._load(config, path)
            with self.phases.timed("warm_up"):
                activations = self._warm_up(config)
            with self.phases.timed("kv_cache"):
                self.states = []  # those of the warm-up
                size = size_kv_cache(
                    config,
                    self.model.shard,
                    max_model_len=max_model_len,
                    dtype=self.backend.shape.cache_dtype,
                    device=self.device,
                    activation_bytes=activations,
                    num_ranks=rank.world_size,
                )
                self.cache_size = smallest(size, parallel.world, self.device)
                self.states = self._make_states({group.window: group.num_blocks for group in self.cache_size.groups})

    def _build(self, config: Config, model_config: ModelSpec, max_model_len: int) -> None:
        dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        shard = shard_of(model_config, self._parallel.rank)
        attention = [layer.mixer for layer in shard.layer_specs if isinstance(layer.mixer, AttentionSpec)]
        self._keeps_row_state = model_config.keeps_row_state
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
            weight_format=weight_format(config.quantization),
        )
        self.model = Decoder(shard, self._context)
        self._stage = PipelineStage(self.model, self._parallel, self._context)
        self.table = RequestTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.kv_cache_block_size,
            device=self.device,
            windows=model_config.windows,
            kernels=self._context.kernels,
        )
        capacity = step_capacity(max_num_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs)
        self._upload = Upload(capacity=capacity, device=self.device)
        self._sampling: SamplingBatch | None = None
        self._sampler: Sampler | KernelSampler = Sampler(self.table, self.vocab_size, self.device)
        self._pooler: Pooler | None = None  # made when first needed
        self._row_states = RowStateCopies() if self._keeps_row_state else None
        self._decode: DecodeStep | None = None
        if self._context.kernels:
            self._use_kernels(config)

    def _use_kernels(self, config: Config) -> None:
        """Sample and decode with our own kernels."""
        from nanovllm.runner.decode_step import DecodeStep
        from nanovllm.runner.kernel_sampler import KernelSampler

        self._sampler = sampler = KernelSampler(self.table, config.max_num_seqs, self.device, pdl=self._context.pdl)
        if self.backend.plans_on_device:
            self._decode = DecodeStep(
                self._stage,
                cast("DeviceBackend", self.backend),
                self.table,
                sampler,
                max_num_seqs=config.max_num_seqs,
                device=self.device,
                eager=config.enforce_eager,
                keeps_row_state=self._keeps_row_state,
                send=lambda: self._send(lambda: None),
                sampling_batch=self._sampling_batch,
                draw=self._draw,
            )

    def _load(self, config: Config, path: Path) -> None:
        slots, dtype = self.model.slots(), self._context.dtype
        if config.load_format == "dummy":
            load_dummy(slots, config.seed, dtype=dtype, device=self.device)
        else:
            from nanovllm.checkpoint.loader import load_checkpoint

            load_checkpoint(
                path,
                config.load_format,
                slots,
                dtype=dtype,
                is_elsewhere=self.model.is_elsewhere,
                shows_progress=self._parallel.rank.index == 0,  # the other ranks are about as far
            )
        self.model.finish_loading()

    @contextmanager
    def _kernels_compiled(self, config: Config) -> Iterator[None]:
        """Compile kernels in the background while the body runs: those of the largest steps and of decode steps."""
        if not self._context.kernels:
            yield
            return
        from nanovllm.kernels.compile_ahead import compile_ahead

        self.states = self._make_states(dict.fromkeys(self.table.blocks, 1))

        def launches() -> None:
            with self.phases.timed("launches"):
                for step in self._largest_steps(config):
                    self.launch(step)
                if self._decode is not None:
                    self._decode.compile(self.states)

        with compile_ahead(launches, num_local_processes=self._parallel.rank.world_size) as wait:
            self.table.clear()
            yield
            with self.phases.timed("kernels"):
                wait()

    def _largest_steps(self, config: Config) -> list[StepPlan]:
        from nanovllm.runner.warm_up import largest_steps

        return largest_steps(
            max_num_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.table.tokens.shape[1],
        )

    def _warm_up(self, config: Config) -> int:
        """Run the largest possible steps on a cache of one block; returns the bytes that their activations take."""
        if self.device.type == "cpu":
            return 0
        from nanovllm.runner.warm_up import peak_memory, score_everything

        self.states, steps = self._make_states(dict.fromkeys(self.table.blocks, 1)), self._largest_steps(config)
        taken = max(
            peak_memory(lambda: [self.launch(step).wait() for step in steps], self.device),
            peak_memory(
                lambda: score_everything(config.max_num_seqs, self.vocab_size, self.backend.shape.dtype, self.device),
                self.device,
            ),
        )
        self.table.clear()
        self._sampling = None
        if self._decode is not None:
            self._decode.reset()
        return taken

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep | GuidedStep:
        self.table.apply(plan)
        if plan.new_rows:
            self._sampling = None  # a row may have another sequence now
        if self._decode is not None and not plan.row_steps:
            return self._decode.launch(plan, self.states)
        positions = plan.sampled_positions()
        head_size = self._head_size(len(positions))
        batch = self._send(lambda: self._build_batch(plan, head_size), extra=extra_capacity(plan))
        if self._row_states is not None:
            self._row_states.apply(plan, self.states)
        x = self._stage.inputs(self.table.tokens, batch.rows, batch.positions)
        scores_prompts = any(step.num_prompt_logprobs is not None for step in plan.row_steps)
        pools = any(step.pooling is not None for step in plan.row_steps)
        needs_all = scores_prompts or pools
        hidden = self._stage.forward(x, self.states, batch.step, None if needs_all else batch.logits_rows)
        pooled = self._pool(plan, batch, hidden) if pools else {}
        prompt_logprobs = {}
        if hidden is not None and needs_all:
            from nanovllm.runner.logprobs import score_prompts

            prompt_logprobs = score_prompts(
                plan, hidden, first_tokens=batch.first_tokens, table=self.table, logits_of=self.model.logits
            )
            hidden = hidden if batch.logits_rows is None else hidden[batch.logits_rows]
        if batch.sampled_rows is None:
            return PendingStep(None, None, prompt_logprobs, self.device, pooled=pooled)
        logits = self._stage.logits(hidden)
        if logits is not None:
            logits = logits[: len(positions)]
        sampling, sampled_rows = self._sampling_batch(positions), batch.sampled_rows

        def finish(masks: Mapping[int, Sequence[bytes]]) -> PendingStep:
            drawn = self._draw(logits, sampling, sampled_rows, masks, batch.sampled)
            self.table.advance(sampling.host_rows if batch.sampled is None else _rows_with_one_token(plan))
            proposed = None if batch.sampled is None else plan.proposed()
            return PendingStep(
                drawn.tokens, drawn.scores, prompt_logprobs, self.device, proposed=proposed, pooled=pooled
            )

        return GuidedStep(finish) if plan.guided_rows else finish({})

    def _make_states(self, num_blocks: dict[int | None, int]) -> list[Any]:
        """`num_blocks`: of each paged group, by its window."""
        max_num_seqs = self.table.tokens.shape[0] - 1
        return make_states(self.model.shard, self.backend, num_blocks, max_num_seqs=max_num_seqs)

    def _build_batch(self, plan: StepPlan, head_size: int) -> ForwardBatch:
        return build_batch(
            plan,
            self.table,
            self.backend,
            self._upload,
            head_size=head_size,
            keeps_row_state=self._keeps_row_state,
        )

    def _head_size(self, num_sampled: int) -> int:
        """The size of the decode graph for as many rows: with a size that it has not seen cuBLAS may load another
        kernel, which waits until the device is idle."""
        return num_sampled if self._decode is None else self._decode.size_for(num_sampled)

    def _draw(
        self,
        logits: Tensor | None,
        sampling: SamplingBatch,
        device_rows: Tensor,
        masks: Mapping[int, Sequence[bytes]],
        sampled: SampledPositions | None = None,
    ) -> Drawn:
        """Sample a token for each row on the rank that has the logits; the other ranks receive them."""
        if logits is None:
            return Drawn(self._stage.receive_tokens(self.table, device_rows, sampled), None)
        sampler = self._sampler if sampled is None else Sampler(self.table, self.vocab_size, self.device)
        drawn = draw(logits, sampling, device_rows, self.table, sampler, masks, sampled)
        self._stage.broadcast_tokens(drawn.tokens)
        return drawn

    def _send(self, build: Callable[[], Sent], *, extra: int = 0) -> Sent:
        """Send all that the device needs for a step in one copy: the table's changes and what `build` adds.

        `extra` is how many integers `build` adds beyond the usual.
        """
        self._upload.start(extra=2 * self.table.num_changes + extra)
        changes = self.table.pack(self._upload) if self.table.num_changes else None
        built = build()
        self._upload.send()
        if changes is not None:
            self.table.flush(changes)
        return built

    def _sampling_batch(self, rows: tuple[int, ...]) -> SamplingBatch:
        if self._sampling is None or self._sampling.rows != rows:
            self._sampling = make_batch(rows, self.table, self.vocab_size, self.device)
        return self._sampling

    def _pool(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor | None) -> dict[int, Tensor]:
        if self._pooler is None:
            from nanovllm.runner.pooling import Pooler

            size = self.model.spec.hidden_size
            self._pooler = Pooler(self._stage, self.table, hidden_size=size, device=self.device)
        return self._pooler.pool(plan, batch, hidden)

    def close(self) -> None:
        if self._decode is not None:
            self._decode.close()
        del self._stage, self.model, self.states, self.table, self.backend, self._sampler, self._decode, self._upload
        self._sampling = self._pooler = None
        if self.device.type == "cuda":
            release_memory(self)


def _rows_with_one_token(plan: StepPlan) -> np.ndarray:
    """The sampled rows that grow by one token. Of the others, the next plan says how many tokens were kept."""
    rows = [step.row for step in plan.row_steps if step.num_sampled and not step.proposed]
    return np.array(plan.decode_rows + tuple(rows), dtype=np.int64)
