"""From logits to tokens: who samples how, and the new tokens in the request table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.sampler import SamplingRows, sample
from nanovllm.plan import NewRow
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.stage import Stage

if TYPE_CHECKING:
    from nanovllm.runner.kernel_sampler import KernelSampler
    from nanovllm.runner.logits import LogitsProcessor
    from nanovllm.runner.logprobs import RowScores
    from nanovllm.runner.verification import Verification


@dataclass(frozen=True)
class SamplingBatch:
    """What sampling needs to know about its rows; kept while the same rows sample.

    There is one entry for each sampled position, so a row whose proposed tokens are verified occurs several times.
    """

    rows: tuple[int, ...]
    host_rows: np.ndarray  # [rows]
    requests: list[NewRow]
    processors: "list[LogitsProcessor]"
    scored: list[tuple[int, int]]  # (index, number of alternatives) of the rows that want logprobs
    cuts: bool  # some row has top-k, top-p or min-p

    @property
    def plain(self) -> bool:
        """Only sampling itself: no processors and no logprobs."""
        return not self.processors and not self.scored


class Sampling:
    """Samples a token for each row on the rank that has the logits; the other ranks receive them."""

    def __init__(self, stage: Stage, table: RequestTable, sampler: "Sampler | KernelSampler | None" = None) -> None:
        """`sampler` serves the steps that verify nothing; None = on torch alone."""
        self._stage, self._table = stage, table
        self._vocab_size = stage.model.spec.vocab_size
        self._sampler: Sampler | KernelSampler = sampler or Sampler(table, self._vocab_size)
        self._batch: SamplingBatch | None = None

    def forget(self) -> None:
        """A row may have another sequence now."""
        self._batch = None

    def batch_of(self, rows: tuple[int, ...]) -> SamplingBatch:
        if self._batch is None or self._batch.rows != rows:
            self._batch = _make_batch(rows, self._table, self._vocab_size)
        return self._batch

    def draw(
        self,
        logits: Tensor | None,  # [rows, vocab]; None on ranks that do not sample
        batch: SamplingBatch,
        device_rows: Tensor,  # [rows] int32
        masks: Mapping[int, Sequence[bytes]],
        verification: "Verification | None" = None,
    ) -> "tuple[Tensor, RowScores | None]":
        """Sample and append the tokens to the table; returns them, [rows], and the logprobs that rows want.

        `masks` has the tokens allowed in guided rows, by row of the table: a mask for each sampled position, one bit
        per token, low bits first. With a `verification` the table contains the proposed tokens.
        """
        if logits is None:
            return self._stage.receive_tokens(self._table, device_rows, verification), None
        sampler = self._sampler
        if verification is not None:
            sampler = Sampler(self._table, self._vocab_size, verification)
        scores = None
        if batch.plain and not masks:
            tokens = sampler.draw(logits, batch, device_rows)
        else:
            from nanovllm.runner.processed_sampling import draw_processed

            tokens, scores = draw_processed(logits, batch, device_rows, masks, sampler, self._table, verification)
        self._stage.broadcast_tokens(tokens)
        return tokens, scores


def _make_batch(rows: tuple[int, ...], table: RequestTable, vocab_size: int) -> SamplingBatch:
    requests = [table.request(row) for row in rows]
    processors: list[LogitsProcessor] = []
    if any(map(is_processed, requests)):
        from nanovllm.runner.logits import build_processors

        processors = build_processors(requests, vocab_size, table.tokens.device)
    return SamplingBatch(
        rows=rows,
        host_rows=np.array(rows, dtype=np.int64),
        requests=requests,
        processors=processors,
        scored=[(i, r.params.logprobs) for i, r in enumerate(requests) if r.params.logprobs is not None],
        cuts=any(map(_is_cut, requests)),
    )


def is_processed(request: NewRow) -> bool:
    """Whether one of the logits processors may be for this request."""
    p = request.params
    limited = p.allowed_token_ids or request.bad_words or p.min_tokens or p.logit_bias
    return bool(limited or p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0)


def _is_cut(request: NewRow) -> bool:
    params = request.params
    return (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0) and not params.greedy


class Sampler:
    """On torch alone: the definition of what is sampled."""

    def __init__(self, table: RequestTable, vocab_size: int, verification: "Verification | None" = None) -> None:
        self._table, self._vocab_size, self._verification = table, vocab_size, verification
        self._rows: tuple[SamplingBatch, SamplingRows] | None = None  # kept while the batch is the same

    def draw(self, logits: Tensor, batch: SamplingBatch, device_rows: Tensor) -> Tensor:
        """Sample a token for each row of [rows, vocab] logits and append it to the row in the table."""
        if self._rows is None or self._rows[0] is not batch:
            self._rows = batch, self._sampling_rows(batch)
        verification = self._verification
        lengths = self._table.length[device_rows] if verification is None else verification.lengths
        tokens = sample(logits.float(), self._rows[1], positions=lengths.long())
        self._table.append(device_rows, tokens, verification)
        return tokens

    def _sampling_rows(self, batch: SamplingBatch) -> SamplingRows:
        device, requests = self._table.tokens.device, batch.requests
        greedy = [index for index, request in enumerate(requests) if request.params.greedy]
        chosen = {index: request.params for index, request in enumerate(requests) if _is_cut(request)}
        plain = [index for index, request in enumerate(requests) if not request.params.greedy and index not in chosen]
        cut = None
        if chosen:
            from nanovllm.layers.sampler_cuts import CutRows

            cut = CutRows.of(chosen, self._vocab_size, device)
        temperature = [request.params.temperature or 1.0 for request in requests]
        return SamplingRows(
            greedy=torch.tensor(greedy, device=device) if greedy else None,
            plain=torch.tensor(plain, device=device) if plain else None,
            cut=cut,
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            seed=torch.tensor([request.seed for request in requests], dtype=torch.int64, device=device),
        )
