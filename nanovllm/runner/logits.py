"""Stages between the model's logits and the sampler, each built only for a batch in which some row asks for it.

A stage holds what can be known when the batch is put together; what changes every step it reads from the request table,
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
class StageInput:
    """What stages may look at: the tokens so far of the step's sampling rows."""

    token_ids: Tensor  # [rows, max_len] int64, valid up to `length`
    length: Tensor  # [rows]
    num_prompt_tokens: Tensor  # [rows]


class Stage(Protocol):
    def apply(self, logits: Tensor, given: StageInput) -> None:
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

    def apply(self, logits: Tensor, given: StageInput) -> None:
        logits.masked_fill_(self.refused, NEVER)


class BadWords:
    """The last token of a bad word is refused where the tokens before it have just been generated."""

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

    def apply(self, logits: Tensor, given: StageInput) -> None:
        length, prompt = given.length[self.rows, None], given.num_prompt_tokens[self.rows, None]
        at = length - self.offsets  # [words, longest - 1]
        said = given.token_ids[self.rows[:, None], at.clamp(min=0)]
        needed = self.offsets <= self.num_before[:, None]
        matches = ((said == self.before) & (at >= prompt)) | ~needed
        hit = matches.all(dim=1)
        # added, not assigned: two words of a row may end in the same token, and one hit must be enough
        logits.index_put_((self.rows, self.last), torch.where(hit, NEVER, 0.0), accumulate=True)


class MinTokens:
    """No end-of-sequence or stop token before `min_tokens` tokens."""

    def __init__(self, rows: Sequence[NewRow], vocab_size: int, device: torch.device) -> None:
        pairs = [(i, t) for i, row in enumerate(rows) if self.wanted(row) for t in row.stop_token_ids if t < vocab_size]
        self.rows = torch.tensor([index for index, _ in pairs], dtype=torch.int64, device=device)
        self.stops = torch.tensor([token for _, token in pairs], dtype=torch.int64, device=device)
        self.min_tokens = torch.tensor([row.params.min_tokens for row in rows], device=device)

    @staticmethod
    def wanted(row: NewRow) -> bool:
        return row.params.min_tokens > 0 and bool(row.stop_token_ids)

    def apply(self, logits: Tensor, given: StageInput) -> None:
        too_early = given.length - given.num_prompt_tokens < self.min_tokens
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

    def apply(self, logits: Tensor, given: StageInput) -> None:
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

    def apply(self, logits: Tensor, given: StageInput) -> None:
        at = torch.arange(given.token_ids.shape[1], device=logits.device)
        known = at < given.length[:, None]
        generated = known & (at >= given.num_prompt_tokens[:, None])
        token_ids = given.token_ids * known  # beyond the length stand leftovers of earlier requests
        zeros = torch.zeros_like(logits)
        seen = zeros.scatter_add(1, token_ids, known.float()) > 0
        counts = zeros.scatter_add(1, token_ids, generated.float())
        penalty = torch.where(seen, self.repetition, 1.0)
        logits.copy_(torch.where(logits > 0, logits / penalty, logits * penalty))
        logits -= self.frequency * counts
        logits -= self.presence * (counts > 0)


class Masks:
    """What grammars refuse, of one step: taken out before all stages, and kept out whatever those do.

    Where the stages leave none of the tokens that a grammar allows (the only one is a bad word, or it is too early for
    the end of sequence), the grammar has the last word and they are undone.
    """

    def __init__(self, masks: Mapping[int, bytes], rows: Sequence[int], vocab_size: int, device: torch.device) -> None:
        indices = np.array([index for index, row in enumerate(rows) if row in masks])
        bits = np.stack([np.frombuffer(masks[row], dtype=np.uint8) for row in rows if row in masks])
        self.rows = _sent(indices, device)  # [masked]
        in_byte = torch.arange(8, dtype=torch.uint8, device=device)
        flags = (_sent(bits, device)[:, :, None] >> in_byte) & 1  # [masked, bytes, 8]
        self.refused = flags.view(len(indices), -1)[:, :vocab_size] == 0  # [masked, vocab]
        self._allowed_logits: Tensor | None = None

    def refuse(self, logits: Tensor) -> None:
        self._allowed_logits = logits[self.rows].masked_fill_(self.refused, NEVER)
        logits[self.rows] = self._allowed_logits

    def restore(self, logits: Tensor) -> None:
        assert self._allowed_logits is not None
        staged = logits[self.rows]
        nothing_left = (staged == NEVER).all(dim=-1, keepdim=True)
        logits[self.rows] = torch.where(nothing_left, self._allowed_logits, staged)


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting for what runs there."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


STAGES: tuple[Callable[[Sequence[NewRow], int, torch.device], Stage], ...] = (
    AllowedTokens,
    BadWords,
    MinTokens,
    LogitBias,
    Penalties,
)


def build_stages(rows: Sequence[NewRow], vocab_size: int, device: torch.device) -> list[Stage]:
    """The stages some row asks for, in the order they apply."""
    return [stage(rows, vocab_size, device) for stage in STAGES if any(map(stage.wanted, rows))]  # type: ignore[attr-defined]
