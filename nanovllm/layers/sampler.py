"""From logits to tokens: greedy, or Gumbel-max with noise that depends on (seed, position, token) alone.

Noise is computed only for tokens that top-k, top-p and min-p leave.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.layers.noise import gumbel, noise_keys

if TYPE_CHECKING:
    from nanovllm.layers.sampler_cuts import CutRows


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of the rows of one step, gathered when the batch changes."""

    greedy: Tensor | None  # [n] indices of greedy rows; None = there are none
    plain: Tensor | None  # indices of rows that draw from the whole vocabulary
    cut: "CutRows | None"  # rows with top-k, top-p or min-p
    temperature: Tensor  # [rows] 1 for greedy rows
    seed: Tensor  # [rows] int64


def sample(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """[rows, vocab] float32 and the positions the new tokens will have -> [rows] int64."""
    if rows.plain is None and rows.cut is None:
        return _most_likely(logits)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    keys = noise_keys(rows.seed, positions)
    if rows.greedy is not None:
        tokens[rows.greedy] = _most_likely(logits[rows.greedy])
    if rows.plain is not None:
        scaled = logits[rows.plain] / rows.temperature[rows.plain, None]
        ids = torch.arange(logits.shape[1], device=logits.device)
        tokens[rows.plain] = _most_likely(scaled + gumbel(keys[rows.plain], ids))
    if rows.cut is not None:
        at = rows.cut.rows
        tokens[at] = rows.cut.sample(logits[at] / rows.temperature[at, None], keys[at])
    return tokens


def _most_likely(scores: Tensor) -> Tensor:  # [rows, n] -> [rows]
    return scores.max(dim=-1).indices  # as argmax, the first one of equals; on a CPU several times faster
