"""The tokens that a grammar allows next in one completion."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.utils.logging import get_logger

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from nanovllm.structured.grammar import Grammar

logger = get_logger(__name__)


class Guide:
    """Advances through a grammar with the tokens of one completion. EOS is allowed where the grammar is complete."""

    def __init__(self, grammar: "Grammar", matcher: "LLMatcher", *, ignore_eos: bool) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._ignore_eos = ignore_eos
        self._tokens: list[int] = []
        self.is_over = False  # a grammar restricts all tokens to the end

    @property
    def num_tokens(self) -> int:
        """How many tokens of the completion have been passed to `mask_after`."""
        return len(self._tokens)

    def mask_after(self, new_tokens: Sequence[int]) -> bytes | None:
        """Advance by `new_tokens` and return the mask of the tokens allowed next, one bit per token, low bits first.

        None if the mask cannot be computed any more, which ends the completion with an error.
        """
        self._tokens += new_tokens
        mask = self._mask(list(new_tokens))
        if mask is None and "too many states" in self._matcher.get_error():
            self._matcher = self._grammar.recompile()
            mask = self._mask(self._tokens)
        if mask is None:
            logger.warning("a grammar's next tokens cannot be computed: %s", self._matcher.get_error().split("\n")[0])
        return mask

    def masks_after_proposed(self, proposed: Sequence[int]) -> list[bytes]:
        """Return the masks after each of these tokens in turn, as far as the grammar allows them.

        The tokens are not part of the completion yet: the guide itself does not advance.
        """
        matcher, masks = self._matcher.deep_copy(), []
        for token in proposed:
            if not matcher.validate_tokens([token]) or not matcher.consume_token(token) or matcher.is_stopped():
                break
            mask = self._grammar.restrict(matcher.compute_bitmask(), ignore_eos=self._ignore_eos)
            if matcher.is_error() or not any(mask):
                break
            masks.append(mask)
        return masks

    def _mask(self, new_tokens: list[int]) -> bytes | None:
        matcher = self._matcher
        mask = matcher.compute_bitmask() if matcher.consume_tokens(new_tokens) else b""
        if matcher.is_error():
            return None
        mask = self._grammar.restrict(mask, ignore_eos=self._ignore_eos)
        return mask if any(mask) else None
