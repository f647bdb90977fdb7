"""Logits processors, which run between the model and the sampler. Each is built only if some row of the batch needs it.

A processor holds what is fixed while the batch stays the same. What changes every step it reads from the request table,
so nothing has to be reset when a row is reused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import NewRow

NEVER = float("-inf")


@dataclass(frozen=True)
class KnownTokens:
    """The tokens before each sampled position. A row whose proposed tokens are verified has several such positions."""

    token_ids: Tensor  # [rows, max_len] int64, valid up to `length`
    length: Tensor  # [rows]
    num_prompt_tokens: Tensor  # [rows]


class LogitsProcessor(Protocol):
    def apply(self, logits: Tensor, known: KnownTokens) -> None:
        """Change [rows, vocab] float32 logits in place."""
        ...


class AllowedTokens:
    def __init__(self, rows: Sequence[NewRow], vocab_size: int, device: torch.device) -> None:
        self.refused = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        for index, row in enumerate(rows):
            if row.params.allowed_token_ids:
                self.refused[index] = True
                self.refused[index, list(row.params.allowed_token_ids)] = False
        self.refused = self.refused.to(device)

    @staticmethod
    def wanted(row: NewRow) -> bool:
        return bool(row.params.allowed_token_ids)

    def apply(self, logits: Tensor, known: KnownTokens) -> None:
        logits.masked_fill_(self.refused, NEVER)


class BadWords:
    """Refuses the last token of a bad word after its other tokens have been generated."""

    def __init__(self, rows: Sequence[NewRow], vocab_size: int, device: torch.device) -> None:
        words = [(index, word) for index, row in enumerate(rows) for word in row.bad_words]
        longest = max(len(word) for _, word in words)
        padded = [[0] * (longest - len(word)) + list(word[:-1]) for _, word in words]
        self.rows = torch.tensor([index for index, _ in words], device=device)  # [words]
        self.last = torch.tensor([word[-1] for _, word in words], device=device)
        self.before = torch.tensor(padded, dtype=torch.int64).view(len(words), longest - 1).to(device)
        self.num_before = torch.tensor([len(word) - 1 for _, word in words], device=device)
        self.offsets = torch.arange(longest - 1, 0, -1, device=device)  # distance from the end of the text

    @staticmethod
    def wanted(row: NewRow) -> bool:
        return bool(row.bad_words)

    def apply(self, logits: Tensor, known: KnownTokens) -> None:
        length, prompt = known.length[self.rows, None], known.num_prompt_tokens[self.rows, None]
        at = length - self.offsets  # [words, longest - 1]
        said = known.token_ids[self.rows[:, None], at.clamp(min=0)]
        needed = self.offsets <= self.num_before[:, None]
        matches = ((said == self.before) & (at >= prompt)) | ~needed
        hit = matches.all(dim=1)
        # added, not assigned: two words of a row may end in the same token, and one match is enough
        logits.index_put_((self.rows, self.last), torch.where(hit, NEVER, 0.0), accumulate=True)


class MinTokens:
    """Refuses end-of-sequence and stop tokens until `min_tokens` tokens are generated."""

    def __init__(self, rows: Sequence[NewRow], vocab_size: int, device: torch.device) -> None:
        pairs = [(i, t) for i, row in enumerate(rows) if self.wanted(row) for t in row.stop_token_ids if t < vocab_size]
        self.rows = torch.tensor([index for index, _ in pairs], dtype=torch.int64, device=device)
        self.stops = torch.tensor([token for _, token in pairs], dtype=torch.int64, device=device)
        self.min_tokens = torch.tensor([row.params.min_tokens for row in rows], device=device)

    @staticmethod
    def wanted(row: NewRow) -> bool:
        return row.params.min_tokens > 0 and bool(row.stop_token_ids)

    def apply(self, logits: Tensor, known: KnownTokens) -> None:
        too_early = known.length - known.num_prompt_tokens < self.min_tokens
        current = logits[self.rows, self.stops]
        logits[self.rows, self.stops] = current.masked_fill(too_early[self.rows], NEVER)


class LogitBias:
    def __init__(self, rows: Sequence[NewRow], vocab_size: int, device: torch.device) -> None:
        entries = [
            (i, token, bias) for i, row in enumerate(rows) for token, bias in (row.params.logit_bias or {}).items()
        ]
        self.rows = torch.tensor([index for index, _, _ in entries], device=device)
        self.tokens = torch.tensor([token for _, token, _ in entries], device=device)
        self.biases = torch.tensor([float(bias) for _, _, bias in entries], device=device)

    @staticmethod
    def wanted(row: NewRow) -> bool:
        return bool(row.params.logit_bias)

    def apply(self, logits: Tensor, known: KnownTokens) -> None:
        logits[self.rows, self.tokens] += self.biases


class Penalties:
    """Repetition (prompt and output, multiplicative), frequency and presence (output alone, subtractive)."""

    def __init__(self, rows: Sequence[NewRow], vocab_size: int, device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.repetition = column([row.params.repetition_penalty for row in rows])
        self.frequency = column([row.params.frequency_penalty for row in rows])
        self.presence = column([row.params.presence_penalty for row in rows])

    @staticmethod
    def wanted(row: NewRow) -> bool:
        p = row.params
        return bool(p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty)

    def apply(self, logits: Tensor, known: KnownTokens) -> None:
        at = torch.arange(known.token_ids.shape[1], device=logits.device)
        valid = at < known.length[:, None]
        generated = valid & (at >= known.num_prompt_tokens[:, None])
        token_ids = known.token_ids * valid  # the rest of the row has tokens of earlier requests
        zeros = torch.zeros_like(logits)
        seen = zeros.scatter_add(1, token_ids, valid.float()) > 0
        counts = zeros.scatter_add(1, token_ids, generated.float())
        penalty = torch.where(seen, self.repetition, 1.0)
        logits.copy_(torch.where(logits > 0, logits / penalty, logits * penalty))
        logits -= self.frequency * counts
        logits -= self.presence * (counts > 0)


class Masks:
    """The grammar masks of one step. Refused tokens are removed before all logits processors and stay removed.

    If the processors leave none of the tokens that a grammar allows (the only one is a bad word, or it is too early for
    the end of sequence), their changes to that row are undone.
    """

    def __init__(
        self,
        masks: Mapping[int, Sequence[bytes]],  # by row of the request table, one for each sampled position
        rows: Sequence[int],  # of each sampled position
        vocab_size: int,
        device: torch.device,
    ) -> None:
        num_before = _num_before(rows)
        masked = [index for index, row in enumerate(rows) if num_before[index] < len(masks.get(row, ()))]
        num_bytes = (vocab_size + 7) // 8  # a mask may be longer
        bits = [np.frombuffer(masks[rows[index]][num_before[index]], np.uint8, num_bytes) for index in masked]
        self.rows = _to_device(np.array(masked), device)  # [masked]
        in_byte = torch.arange(8, dtype=torch.uint8, device=device)
        flags = (_to_device(np.stack(bits), device)[:, :, None] >> in_byte) & 1  # [masked, bytes, 8]
        self.refused = flags.view(len(masked), -1)[:, :vocab_size] == 0  # [masked, vocab]
        self._allowed_logits: Tensor | None = None

    def refuse(self, logits: Tensor) -> None:
        self._allowed_logits = logits[self.rows].masked_fill_(self.refused, NEVER)
        logits[self.rows] = self._allowed_logits

    def restore(self, logits: Tensor) -> None:
        assert self._allowed_logits is not None
        processed = logits[self.rows]
        nothing_left = (processed == NEVER).all(dim=-1, keepdim=True)
        logits[self.rows] = torch.where(nothing_left, self._allowed_logits, processed)


def _num_before(rows: Sequence[int]) -> list[int]:
    """How many earlier entries of `rows` are the same row."""
    counts: dict[int, int] = {}
    found = []
    for row in rows:
        found.append(counts.get(row, 0))
        counts[row] = found[-1] + 1
    return found


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without waiting for what runs there."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


PROCESSORS: tuple[Callable[[Sequence[NewRow], int, torch.device], LogitsProcessor], ...] = (
    AllowedTokens,
    BadWords,
    MinTokens,
    LogitBias,
    Penalties,
)


def build_processors(rows: Sequence[NewRow], vocab_size: int, device: torch.device) -> list[LogitsProcessor]:
    """The processors that some row needs, in the order they apply."""
    return [make(rows, vocab_size, device) for make in PROCESSORS if any(map(make.wanted, rows))]  # type: ignore[attr-defined]
