"""A compiled form, shared by all completions that must have it."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from nanovllm.structured.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llguidance's own bounds on work and memory; the rest are its defaults
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}

# Estimates of memory, above what was measured: small schemas take 45 KB, 500 alternatives of 70 characters 4.6 MB; the
# states of the lexer, which grow with use, 0.6 KB each and up to ten a mask
BYTES_A_GRAMMAR, BYTES_A_CHARACTER = 64 << 10, 160
BYTES_A_MASK, MAX_LEXER_BYTES = 6 << 10, 32 << 20


class Grammar:
    def __init__(
        self, text: str, vocabulary: "LLTokenizer", *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """A ValueError says what llguidance, whose language `text` is in, cannot do with it."""
        self._text = text
        self._vocabulary = vocabulary
        self._known_tokens = None if vocabulary.vocab_size <= vocab_size else (1 << vocab_size) - 1
        self._end_tokens = sum(1 << token for token in set(eos_token_ids))
        self._matcher = self._compile()
        self._num_masks = 0  # since it was compiled

    def _compile(self) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._vocabulary, self._text, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def guide(self, *, ignore_eos: bool = False) -> Guide:
        """For one completion. `ignore_eos` ends it only where nothing else may come."""
        return Guide(self, self._matcher.deep_copy(), ignore_eos=ignore_eos)

    def renewed(self) -> "LLMatcher":
        """A matcher at the form's beginning, with an empty lexer. The lexer's states are shared by all copies of a
        matcher, and when they have reached their limit none of the copies can go on."""
        self._matcher, self._num_masks = self._compile(), 0
        return self._matcher.deep_copy()

    def narrowed(self, mask: bytes, *, ignore_eos: bool) -> bytes:
        """Without the tokens that the model has not, and without the end of sequence where that is to be avoided and
        can be."""
        self._num_masks += 1
        if self._known_tokens is None and not ignore_eos:
            return mask
        bits = int.from_bytes(mask, "little")
        if self._known_tokens is not None:
            bits &= self._known_tokens
        if ignore_eos:
            bits = (bits & ~self._end_tokens) or bits
        return bits.to_bytes(len(mask), "little")

    @property
    def num_bytes(self) -> int:
        """A rough estimate."""
        grown = min(BYTES_A_MASK * self._num_masks, MAX_LEXER_BYTES)
        return BYTES_A_GRAMMAR + BYTES_A_CHARACTER * len(self._text) + grown
