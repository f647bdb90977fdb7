"""From logits to tokens: logits processors, logprobs, sampling, and the new tokens in the request table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.sampler import SamplingRows, sample
from nanovllm.plan import NewRow
from nanovllm.runner.request_table import RequestTable, SampledPositions
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.runner.kernel_sampler import KernelSampler
    from nanovllm.runner.logits import KnownTokens, LogitsProcessor
    from nanovllm.runner.logprobs import RowScores

# Parameters that no logits processor looks at
NOT_PROCESSED = frozenset(
    (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "ignore_eos", "logprobs"),
        *("prompt_logprobs", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
        *("detokenize", "structured_outputs", "thinking_token_budget"),
    )
)
# The others, with their values that ask for nothing; an empty one is None here
PROCESSED = [(field.name, field.default or None) for field in fields(SamplingParams) if field.name not in NOT_PROCESSED]


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


@dataclass(frozen=True)
class Drawn:
    tokens: Tensor  # [rows]
    scores: "RowScores | None"


def make_batch(rows: tuple[int, ...], table: RequestTable, vocab_size: int, device: torch.device) -> SamplingBatch:
    requests = [table.request(row) for row in rows]
    return SamplingBatch(
        rows=rows,
        host_rows=np.array(rows, dtype=np.int64),
        requests=requests,
        processors=_processors(requests, vocab_size, device),
        scored=[(i, r.params.logprobs) for i, r in enumerate(requests) if r.params.logprobs is not None],
        cuts=any(map(is_cut, requests)),
    )


def _processors(requests: list[NewRow], vocab_size: int, device: torch.device) -> "list[LogitsProcessor]":
    if not any((getattr(r.params, name) or None) != default for r in requests for name, default in PROCESSED):
        return []
    from nanovllm.runner.logits import build_processors

    return build_processors(requests, vocab_size, device)


def is_cut(request: NewRow) -> bool:
    params = request.params
    return (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0) and not params.greedy


def draw(
    logits: Tensor,
    batch: SamplingBatch,
    device_rows: Tensor,
    table: RequestTable,
    sampler: "Sampler | KernelSampler",
    masks: Mapping[int, Sequence[bytes]],
    sampled: SampledPositions | None = None,
) -> Drawn:
    """Sample a token for each row of [rows, vocab] logits and append it to the row; `device_rows` is [rows] int32.

    `masks` has the tokens allowed in guided rows, by row of the table: a mask for each sampled position, one bit per
    token, low bits first. `sampled` is given if the step verifies proposed tokens, which the table then contains.
    """
    raw = None
    if not batch.plain or masks:
        logits = logits.float()
    if batch.scored:
        raw = logits[[index for index, _ in batch.scored]].log_softmax(dim=-1)  # before any processor changes them
    grammar = None
    if masks:
        from nanovllm.runner.logits import Masks

        grammar = Masks(masks, batch.rows, logits.shape[1], logits.device)
        grammar.refuse(logits)
    if batch.processors:
        known = _known_tokens(batch, device_rows, table, sampled)
        for processor in batch.processors:
            processor.apply(logits, known)
        if grammar is not None:
            grammar.restore(logits)
    tokens = sampler.draw(logits, batch, device_rows, sampled)
    if raw is None:
        return Drawn(tokens, None)
    from nanovllm.runner.logprobs import score_rows

    chosen = tokens[[index for index, _ in batch.scored]]
    return Drawn(tokens, score_rows(raw, chosen, batch.scored))


def _known_tokens(
    batch: SamplingBatch, device_rows: Tensor, table: RequestTable, sampled: SampledPositions | None
) -> "KnownTokens":
    from nanovllm.runner.logits import KnownTokens

    longest = int(table.host_length[batch.host_rows].max())
    if sampled is not None:
        longest = min(longest + len(batch.rows), table.tokens.shape[1])  # the proposed tokens of one row, or fewer
    lengths = table.length[device_rows] if sampled is None else sampled.lengths
    return KnownTokens(
        token_ids=table.tokens[device_rows, :longest].long(),
        length=lengths.long(),
        num_prompt_tokens=torch.from_numpy(table.num_prompt_tokens[batch.host_rows]).to(device_rows.device),
    )


class Sampler:
    """On torch alone: the definition of what is sampled."""

    def __init__(self, table: RequestTable, vocab_size: int, device: torch.device) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._device = device
        self._rows: tuple[SamplingBatch, SamplingRows] | None = None  # kept while the batch is the same

    def draw(
        self, logits: Tensor, batch: SamplingBatch, device_rows: Tensor, sampled: SampledPositions | None = None
    ) -> Tensor:
        if self._rows is None or self._rows[0] is not batch:
            self._rows = batch, self._sampling_rows(batch.requests)
        lengths = self._table.length[device_rows] if sampled is None else sampled.lengths
        tokens = sample(logits.float(), self._rows[1], positions=lengths.long())
        self._table.append(device_rows, tokens, sampled)
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
