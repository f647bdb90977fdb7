"""A compiled grammar, shared by all completions that must follow it."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from nanovllm.structured.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Options of llguidance's LLParserLimits; the others keep their defaults.
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}

# Estimates of a grammar's memory, above the measured values: a small schema takes 45 KB, 500 alternatives of 70
# characters take 4.6 MB. The lexer grows with use: a state takes 0.6 KB, and computing a mask adds up to ten states.
BYTES_PER_GRAMMAR, BYTES_PER_CHARACTER = 64 << 10, 160
BYTES_PER_MASK, MAX_LEXER_BYTES = 6 << 10, 32 << 20


class Grammar:
    """Compiles `text`, a grammar in llguidance's own language. A ValueError has llguidance's reason for refusing it."""

    def __init__(
        self, text: str, vocabulary: "LLTokenizer", *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._text = text
        self._vocabulary = vocabulary
        # Bit masks over the vocabulary. The tokenizer may have tokens that the model has no logits for.
        self._model_tokens = None if vocabulary.vocab_size <= vocab_size else (1 << vocab_size) - 1
        self._eos_tokens = sum(1 << token for token in set(eos_token_ids))
        self._matcher = self._compile()
        self._num_masks = 0  # computed since the matcher was compiled

    def _compile(self) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._vocabulary, self._text, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def guide(self, *, ignore_eos: bool = False) -> Guide:
        """A guide for one completion. With `ignore_eos`, EOS is allowed only if no other token is."""
        return Guide(self, self._matcher.deep_copy(), ignore_eos=ignore_eos)

    def recompile(self) -> "LLMatcher":
        """Compile again and return a matcher at the beginning of the grammar, with an empty lexer.

        All copies of a matcher share the states of its lexer. At the limit of states none of the copies can continue.
        """
        self._matcher, self._num_masks = self._compile(), 0
        return self._matcher.deep_copy()

    def restrict(self, mask: bytes, *, ignore_eos: bool) -> bytes:
        """Remove the tokens that the model does not have and, with `ignore_eos`, EOS if another token is allowed."""
        self._num_masks += 1
        if self._model_tokens is None and not ignore_eos:
            return mask
        bits = int.from_bytes(mask, "little")
        if self._model_tokens is not None:
            bits &= self._model_tokens
        if ignore_eos:
            bits = (bits & ~self._eos_tokens) or bits
        return bits.to_bytes(len(mask), "little")

    @property
    def num_bytes(self) -> int:
        """A rough estimate of the memory that the grammar takes."""
        lexer = min(BYTES_PER_MASK * self._num_masks, MAX_LEXER_BYTES)
        return BYTES_PER_GRAMMAR + BYTES_PER_CHARACTER * len(self._text) + lexer
