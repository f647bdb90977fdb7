"""Limit the tokens of a completion's reasoning: when the budget is used, the only token allowed is the one that ends
it, such as </think>."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from nanovllm.errors import RequestError

if TYPE_CHECKING:
    from nanovllm.text.tokenizer import Tokenizer

MARKERS = {"</think>": "<think>", "[/THINK]": "[THINK]", "<channel|>": "<|channel>"}  # end of reasoning: its begin


class Stage(Enum):
    BEFORE = auto()  # reasoning may still begin: there are only blanks so far
    INSIDE = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True)
class Thought:
    """How far the reasoning of a completion is."""

    stage: Stage
    num_tokens: int = 0  # between begin and end


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingTokens:
    """The tokens that begin and end reasoning, for one model."""

    open_id: int | None
    close_id: int
    is_blank: Callable[[int], bool]  # true for a token that is only whitespace
    vocab_size: int

    def start(self, prompt_token_ids: Sequence[int]) -> Thought:
        """The state after the prompt: inside the reasoning if the prompt ends with its begin, blanks not counted."""
        last = next((token for token in reversed(prompt_token_ids) if not self.is_blank(token)), None)
        return Thought(Stage.INSIDE if last is not None and last == self.open_id else Stage.BEFORE)

    def after(self, thought: Thought, token: int) -> Thought:
        """The state after one more token of the completion."""
        if thought.stage is Stage.OVER:
            return thought
        if token == self.close_id:
            return replace(thought, stage=Stage.OVER)
        if thought.stage is Stage.INSIDE:
            return replace(thought, num_tokens=thought.num_tokens + 1)
        if token == self.open_id:
            return replace(thought, stage=Stage.INSIDE)
        return thought if self.is_blank(token) else replace(thought, stage=Stage.OVER)


class ThinkingBudget:
    """The guide (see `engine/guide.py`) of a completion that reasons with at most `budget` tokens."""

    def __init__(self, tokens: ThinkingTokens, budget: int, prompt_token_ids: Sequence[int]) -> None:
        self._tokens = tokens
        self._budget = budget
        self._thought = tokens.start(prompt_token_ids)
        num_bytes = (tokens.vocab_size + 7) // 8
        self._all = b"\xff" * num_bytes
        self._only_close = (1 << tokens.close_id).to_bytes(num_bytes, "little")
        self.num_tokens = 0  # of the completion, as far as it has followed them

    @property
    def is_over(self) -> bool:
        """True if no later token is restricted."""
        return self._thought.stage is Stage.OVER

    def mask_after(self, new_tokens: Sequence[int]) -> bytes:
        self.num_tokens += len(new_tokens)
        for token in new_tokens:
            self._thought = self._tokens.after(self._thought, token)
        return self._mask(self._thought)

    def masks_after_proposed(self, proposed: Sequence[int]) -> list[bytes]:
        thought, masks = self._thought, []
        for token in proposed:
            if self._is_used(thought) and token != self._tokens.close_id:
                break
            thought = self._tokens.after(thought, token)
            masks.append(self._mask(thought))
        return masks

    def _mask(self, thought: Thought) -> bytes:
        return self._only_close if self._is_used(thought) else self._all

    def _is_used(self, thought: Thought) -> bool:
        return thought.stage is Stage.INSIDE and thought.num_tokens >= self._budget


def closing_token(tokenizer: "Tokenizer") -> str | None:
    """The token with which the model ends its reasoning; None if the vocabulary has none that is known."""
    return next((close for close in MARKERS if tokenizer.backend.token_to_id(close) is not None), None)


def thinking_tokens(tokenizer: "Tokenizer", vocab_size: int) -> ThinkingTokens:
    """The tokens of reasoning in this vocabulary. A RequestError if the model has none that ends it."""
    close = closing_token(tokenizer)
    close_id = None if close is None else tokenizer.backend.token_to_id(close)
    if close is None or close_id is None or close_id >= vocab_size:
        known = ", ".join(MARKERS)
        raise RequestError(
            f"thinking_token_budget: the vocabulary has none of the tokens {known} with which reasoning could be ended"
        )
    return ThinkingTokens(
        open_id=tokenizer.backend.token_to_id(MARKERS[close]),
        close_id=close_id,
        is_blank=lambda token: not tokenizer.decode_token(token).strip(),
        vocab_size=vocab_size,
    )
