"""From a step's logits to its tokens: stages, logprobs, the draw, and the request table brought up to date."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.kernels.launch import dependent_launch
from nanovllm.layers.sampler import SamplingRows, sample
from nanovllm.plan import NewRow
from nanovllm.runner.logits import Masks, Stage, StageInput, build_stages
from nanovllm.runner.logprobs import RowScores, score_rows
from nanovllm.runner.request_table import RequestTable


@dataclass(frozen=True)
class SamplingBatch:
    """What sampling needs to know of a batch; kept while the same rows sample."""

    rows: tuple[int, ...]
    host_rows: np.ndarray  # [rows]
    requests: list[NewRow]
    stages: list[Stage]
    scored: list[tuple[int, int]]  # (index, number of alternatives) of the rows that want logprobs
    cuts: bool  # top-k, top-p or min-p somewhere

    @property
    def plain(self) -> bool:
        """Nothing but the draw itself."""
        return not self.stages and not self.scored


@dataclass(frozen=True)
class Drawn:
    tokens: Tensor  # [rows]
    scores: RowScores | None


def make_batch(rows: tuple[int, ...], table: RequestTable, vocab_size: int, device: torch.device) -> SamplingBatch:
    requests = [table.request(row) for row in rows]
    return SamplingBatch(
        rows=rows,
        host_rows=np.array(rows, dtype=np.int64),
        requests=requests,
        stages=build_stages(requests, vocab_size, device),
        scored=[(i, r.params.logprobs) for i, r in enumerate(requests) if r.params.logprobs is not None],
        cuts=any(map(is_cut, requests)),
    )


def is_cut(request: NewRow) -> bool:
    params = request.params
    return (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0) and not params.greedy


def draw(
    logits: Tensor,
    batch: SamplingBatch,
    device_rows: Tensor,
    table: RequestTable,
    sampler: "Sampler | KernelSampler",
    masks: Mapping[int, bytes],
) -> Drawn:
    """A token for each row of [rows, vocab] logits, appended to the row's tokens; `device_rows` is [rows] int32.

    `masks` has the allowed tokens of guided rows, by row of the table: a bit a token, low bits first.
    """
    raw = None
    if not batch.plain or masks:
        logits = logits.float()
    if batch.scored:
        raw = logits[[index for index, _ in batch.scored]].log_softmax(dim=-1)  # before any stage touches them
    grammar = Masks(masks, batch.rows, logits.shape[1], logits.device) if masks else None
    if grammar is not None:
        grammar.refuse(logits)
    if batch.stages:
        longest = int(table.host_length[batch.host_rows].max())
        given = StageInput(
            token_ids=table.tokens[device_rows, :longest].long(),
            length=table.length[device_rows].long(),
            num_prompt_tokens=torch.from_numpy(table.num_prompt_tokens[batch.host_rows]).to(logits.device),
        )
        for stage in batch.stages:
            stage.apply(logits, given)
        if grammar is not None:
            grammar.restore(logits)
    tokens = sampler.draw(logits, batch, device_rows)
    if raw is None:
        return Drawn(tokens, None)
    chosen = tokens[[index for index, _ in batch.scored]]
    return Drawn(tokens, score_rows(raw, chosen, batch.scored))


class Sampler:
    """On torch alone: the definition of what is drawn."""

    def __init__(self, table: RequestTable, vocab_size: int, device: torch.device) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._device = device
        self._rows: tuple[SamplingBatch, SamplingRows] | None = None  # kept while the batch is the same

    def draw(self, logits: Tensor, batch: SamplingBatch, device_rows: Tensor) -> Tensor:
        if self._rows is None or self._rows[0] is not batch:
            self._rows = batch, self._sampling_rows(batch.requests)
        tokens = sample(logits.float(), self._rows[1], positions=self._table.length[device_rows].long())
        self._table.append(device_rows, tokens)
        return tokens

    def _sampling_rows(self, requests: list[NewRow]) -> SamplingRows:
        params = [request.params for request in requests]
        cut = [is_cut(request) for request in requests]

        def indices(chosen: list[bool]) -> Tensor | None:
            found = [index for index, yes in enumerate(chosen) if yes]
            return torch.tensor(found, device=self._device) if found else None

        def column(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        return SamplingRows(
            greedy=indices([p.greedy for p in params]),
            plain=indices([not p.greedy and not c for p, c in zip(params, cut, strict=True)]),
            cut=indices(cut),
            temperature=column([p.temperature or 1.0 for p in params], torch.float32),
            top_k=column(
                [min(p.top_k, self._vocab_size) if p.top_k > 0 else self._vocab_size for p in params], torch.int64
            ),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            seed=column([request.seed for request in requests], torch.int64),
        )


class KernelSampler:
    """The same with our own kernels, straight from the request table's columns; nothing here waits for the device."""

    def __init__(self, table: RequestTable, max_num_seqs: int, device: torch.device) -> None:
        from nanovllm.kernels.sampling.sample import sample
        from nanovllm.kernels.sampling.thresholds import cut_thresholds

        self._sample, self._cut_thresholds = sample, cut_thresholds
        self._table = table
        self._out = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._thresholds = torch.empty(max_num_seqs, dtype=torch.float32, device=device)
        self._scratch = torch.zeros(max_num_seqs, 2, dtype=torch.int64, device=device)

    def draw(self, logits: Tensor, batch: SamplingBatch, device_rows: Tensor) -> Tensor:
        return self.launch(logits, device_rows, cuts=batch.cuts)

    def launch(self, logits: Tensor, rows: Tensor, *, cuts: bool) -> Tensor:
        """[n, vocab] logits of [n] rows, 0 = padding -> [n] tokens, valid until the next launch."""
        table, n, thresholds = self._table, len(rows), None
        if cuts:
            thresholds = self._thresholds[:n]
            self._cut_thresholds(
                logits,
                rows=rows,
                temperature=table.temperature,
                top_k=table.top_k,
                top_p=table.top_p,
                min_p=table.min_p,
                out=thresholds,
                pdl=dependent_launch(),
            )
        self._sample(
            logits,
            rows=rows,
            tokens=table.tokens,
            length=table.length,
            temperature=table.temperature,
            seed_low=table.seed_low,
            seed_high=table.seed_high,
            thresholds=thresholds,
            out=self._out,
            scratch=self._scratch,
            pdl=dependent_launch(),
        )
        return self._out[:n]
