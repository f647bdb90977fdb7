"""The device side of the engine, put together: model, KV cache, request table, sampler; one step after another."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.backend import CacheShape
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.config import Config
from nanovllm.layers.sampler import SamplingRows, sample
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import Decoder
from nanovllm.plan import NewRow, StepPlan, StepResult, TokenLogprobs
from nanovllm.runner.device import resolve_cache_dtype, resolve_device, resolve_dtype
from nanovllm.runner.forward_batch import ForwardBatch, build_batch
from nanovllm.runner.kv_cache import size_kv_cache
from nanovllm.runner.logits import Stage, StageInput, build_stages
from nanovllm.runner.logprobs import PendingLogprobs, score
from nanovllm.runner.request_table import RequestTable
from nanovllm.utils.loader import checkpoint_tensors, fill_dummy, load_weights

PROMPT_ROWS = 128  # prompt tokens scored at once: [rows, vocab] in float32 is large


@dataclass(frozen=True)
class SamplingBatch:
    """What sampling needs to know of a batch; kept while the same rows sample."""

    rows: tuple[int, ...]
    host_rows: np.ndarray  # [rows]
    device_rows: Tensor  # [rows]
    sampling: SamplingRows
    stages: list[Stage]
    scored: list[tuple[int, int]]  # (index, number of alternatives) of the rows that want logprobs


class PendingStep:
    """A launched step; `wait` brings its tokens to the host."""

    def __init__(
        self,
        tokens: Tensor | None,
        logprobs: PendingLogprobs | None,
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> None:
        self._tokens = tokens
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def wait(self) -> StepResult:
        return StepResult(
            tokens=[] if self._tokens is None else self._tokens[:, None].tolist(),
            logprobs={} if self._logprobs is None else self._logprobs.wait(),
            prompt_logprobs=self._prompt_logprobs,
        )


class ModelRunner:
    @torch.inference_mode()
    def __init__(self, config: Config, model_config: ModelConfig, path: Path, *, max_model_len: int) -> None:
        self.device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype)
        self.vocab_size = model_config.vocab_size
        self.backend = SdpaBackend(
            CacheShape(
                num_layers=model_config.num_layers,
                num_heads=model_config.num_heads,
                num_kv_heads=model_config.num_kv_heads,
                head_dim=model_config.head_dim,
                block_size=config.kvcache_block_size,
                windows=model_config.windows,
                dtype=dtype,
                cache_dtype=cache_dtype,
                device=self.device,
            )
        )
        self.model = Decoder(
            model_config, backend=self.backend, max_position=max_model_len, dtype=dtype, device=self.device
        )
        self._load(config, model_config, path, dtype)
        self.cache_size = size_kv_cache(
            config, model_config, max_model_len=max_model_len, dtype=cache_dtype, device=self.device
        )
        self.caches = self.backend.make_cache(self.cache_size.num_blocks)
        self.table = RequestTable(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.kvcache_block_size,
            device=self.device,
        )
        self._sampling: SamplingBatch | None = None

    def _load(self, config: Config, model_config: ModelConfig, path: Path, dtype: torch.dtype) -> None:
        destinations = self.model.destinations()
        if config.load_format == "dummy":
            fill_dummy(destinations, config.seed)
        else:
            tensors = checkpoint_tensors(path, config.load_format, dtype)
            # disable=None: a bar on a terminal, nothing in a log
            bar = tqdm(
                tensors, desc="Loading weights", unit="tensor", total=len(destinations), leave=False, disable=None
            )
            load_weights(destinations, bar, source=str(path), tied_head=model_config.tie_word_embeddings)
        self.model.finish_loading()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        self.table.apply(plan)
        if plan.new_rows:
            self._sampling = None  # a row may have been filled anew
        batch = build_batch(plan, self.table, self.backend, self.device)
        hidden = self.model(batch.input_ids, batch.positions, self.caches, batch.attn)
        prompt_logprobs = self._score_prompts(plan, batch, hidden)
        rows = plan.sampled_rows()
        if not rows:
            return PendingStep(None, None, prompt_logprobs)
        logits = self.model.logits(hidden if batch.logits_rows is None else hidden[batch.logits_rows])
        tokens, logprobs = self._sample(logits, self._sampling_batch(rows))
        return PendingStep(tokens, logprobs, prompt_logprobs)

    def close(self) -> None:
        del self.model, self.caches, self.table, self.backend
        self._sampling = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, PendingLogprobs | None]:
        """Draw a token for each row of [rows, vocab] logits and append it to the row's tokens."""
        host_length = self.table.length[batch.host_rows]
        length = torch.from_numpy(host_length).to(self.device)
        raw = None
        if batch.scored:
            raw = logits[[index for index, _ in batch.scored]].log_softmax(dim=-1)  # before any stage touches them
        if batch.stages:
            given = StageInput(
                token_ids=self.table.tokens[batch.device_rows, : int(host_length.max())].long(),
                length=length,
                num_prompt_tokens=torch.from_numpy(self.table.num_prompt_tokens[batch.host_rows]).to(self.device),
            )
            for stage in batch.stages:
                stage.apply(logits, given)
        tokens = sample(logits, batch.sampling, positions=length)
        self.table.advance(batch.host_rows, batch.device_rows, length, tokens)
        if raw is None:
            return tokens, None
        chosen = tokens[[index for index, _ in batch.scored]]
        return tokens, PendingLogprobs(raw, chosen, batch.scored)

    def _sampling_batch(self, rows: tuple[int, ...]) -> SamplingBatch:
        if self._sampling is None or self._sampling.rows != rows:
            requests = [self.table.request(row) for row in rows]
            host_rows = np.array(rows, dtype=np.int64)
            self._sampling = SamplingBatch(
                rows=rows,
                host_rows=host_rows,
                device_rows=torch.from_numpy(host_rows).to(self.device),
                sampling=self._sampling_rows(requests),
                stages=build_stages(requests, self.vocab_size, self.device),
                scored=[(i, r.params.logprobs) for i, r in enumerate(requests) if r.params.logprobs is not None],
            )
        return self._sampling

    def _sampling_rows(self, requests: list[NewRow]) -> SamplingRows:
        params = [request.params for request in requests]
        cut = [(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) and not p.greedy for p in params]

        def indices(chosen: list[bool]) -> Tensor | None:
            found = [index for index, yes in enumerate(chosen) if yes]
            return torch.tensor(found, device=self.device) if found else None

        def column(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return SamplingRows(
            greedy=indices([p.greedy for p in params]),
            plain=indices([not p.greedy and not c for p, c in zip(params, cut, strict=True)]),
            cut=indices(cut),
            temperature=column([p.temperature or 1.0 for p in params], torch.float32),
            top_k=column(
                [min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size for p in params], torch.int64
            ),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            seed=column([request.seed for request in requests], torch.int64),
        )

    def _score_prompts(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of the prompt tokens that follow each scored chunk's positions."""
        scored: dict[int, list[TokenLogprobs]] = {}
        for index, chunk in enumerate(plan.chunks, len(plan.decode_rows)):
            if chunk.num_prompt_logprobs is None:
                continue
            num_prompt = int(self.table.num_prompt_tokens[chunk.row])
            first, count = int(batch.first_tokens[index]), min(chunk.num_new, num_prompt - 1 - chunk.start)
            results = scored[chunk.row] = []
            for begin in range(0, count, PROMPT_ROWS):
                end = min(begin + PROMPT_ROWS, count)
                logprobs = self.model.logits(hidden[first + begin : first + end]).log_softmax(dim=-1)
                following = self.table.tokens[chunk.row, chunk.start + 1 + begin : chunk.start + 1 + end].long()
                results += score(logprobs, following, chunk.num_prompt_logprobs)
        return scored
