"""Sampling with logits processors, grammar masks and logprobs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.runner.logits import KnownTokens, Masks
from nanovllm.runner.logprobs import RowScores, score_rows
from nanovllm.runner.request_table import RequestTable

if TYPE_CHECKING:
    from nanovllm.runner.kernel_sampler import KernelSampler
    from nanovllm.runner.sampling import Sampler, SamplingBatch
    from nanovllm.runner.verification import Verification


def draw_processed(
    logits: Tensor,
    batch: "SamplingBatch",
    device_rows: Tensor,
    masks: Mapping[int, Sequence[bytes]],
    sampler: "Sampler | KernelSampler",
    table: RequestTable,
    verification: "Verification | None",
) -> tuple[Tensor, RowScores | None]:
    """As `Sampling.draw`: change the logits, sample, and score the sampled tokens."""
    logits = logits.float()
    raw = None
    if batch.scored:
        raw = logits[[index for index, _ in batch.scored]].log_softmax(dim=-1)  # before any processor changes them
    grammar = None
    if masks:
        grammar = Masks(masks, batch.rows, logits.shape[1], logits.device)
        grammar.refuse(logits)
    if batch.processors:
        known = _known_tokens(batch, device_rows, table, verification)
        for processor in batch.processors:
            processor.apply(logits, known)
        if grammar is not None:
            grammar.restore(logits)
    tokens = sampler.draw(logits, batch, device_rows)
    if raw is None:
        return tokens, None
    chosen = tokens[[index for index, _ in batch.scored]]
    named = [batch.requests[index].params.logprob_token_ids or () for index, _ in batch.scored]
    return tokens, score_rows(raw, chosen, batch.scored, named)


def _known_tokens(
    batch: "SamplingBatch", device_rows: Tensor, table: RequestTable, verification: "Verification | None"
) -> KnownTokens:
    longest = int(table.host_length[batch.host_rows].max())
    if verification is not None:
        longest = min(longest + len(batch.rows), table.tokens.shape[1])  # the proposed tokens of one row, or fewer
    lengths = table.length[device_rows] if verification is None else verification.lengths
    return KnownTokens(
        token_ids=table.tokens[device_rows, :longest].long(),
        length=lengths.long(),
        num_prompt_tokens=torch.from_numpy(table.num_prompt_tokens[batch.host_rows]).to(device_rows.device),
    )
