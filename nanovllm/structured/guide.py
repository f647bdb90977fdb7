"""Which tokens may come next in one completion of a given form."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.utils.logging import get_logger

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from nanovllm.structured.grammar import Grammar

logger = get_logger(__name__)


class Guide:
    """Follows a completion; where the form is complete, the end of sequence is among the tokens that may come."""

    def __init__(self, grammar: "Grammar", matcher: "LLMatcher", *, ignore_eos: bool) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._ignore_eos = ignore_eos
        self._tokens: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Of the completion, already followed."""
        return len(self._tokens)

    def mask_behind(self, new_tokens: Sequence[int]) -> bytes | None:
        """A bit a token, low bits first, of what may come behind all tokens so far, these included; None if that
        cannot be said any more."""
        self._tokens += new_tokens
        mask = self._mask(list(new_tokens))
        if mask is None and "too many states" in self._matcher.get_error():
            self._matcher = self._grammar.renewed()
            mask = self._mask(self._tokens)
        if mask is None:
            logger.warning("a grammar cannot be followed any further: %s", self._matcher.get_error().split("\n")[0])
        return mask

    def _mask(self, new_tokens: list[int]) -> bytes | None:
        matcher = self._matcher
        mask = matcher.compute_bitmask() if matcher.consume_tokens(new_tokens) else b""
        if matcher.is_error():
            return None
        mask = self._grammar.narrowed(mask, ignore_eos=self._ignore_eos)
        return mask if any(mask) else None
