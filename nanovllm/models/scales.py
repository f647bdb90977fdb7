"""Factors of the embedded tokens and of the logits, and a bound of the logits; no torch but what tensors can do."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Scales:
    embedding: float = 1.0
    rounds_embedding: bool = False  # the factor of the embedded tokens is rounded to the dtype of these first
    logits: float = 1.0
    logits_cap: float | None = None  # logits become cap * tanh(logits / cap)

    def embedded(self, x: Any) -> Any:  # [num_tokens, hidden]
        """Embedded tokens with their factor."""
        return x * (x.new_tensor(self.embedding, device="cpu").item() if self.rounds_embedding else self.embedding)

    def scaled_logits(self, logits: Any) -> Any:  # [num_rows, vocab]
        if self.logits != 1.0:
            logits = logits * self.logits
        return logits if self.logits_cap is None else (logits / self.logits_cap).tanh() * self.logits_cap
