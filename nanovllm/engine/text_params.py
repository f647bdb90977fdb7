"""Sampling parameters that need the tokenizer: bad words, structured outputs and the budget of reasoning."""

import threading
from typing import TYPE_CHECKING

from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.thinking import ThinkingBudget
    from nanovllm.structured.compiler import Compiler
    from nanovllm.text.tokenizer import Tokenizer


class TextParams:
    def __init__(self, tokenizer: "Tokenizer", *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler: Compiler | None = None
        self._compiler_lock = threading.Lock()

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    @property
    def compiler(self) -> "Compiler":
        """The compiler of structured outputs; made for the first request that has some, in any thread."""
        with self._compiler_lock:
            if self._compiler is None:
                from nanovllm.structured.compiler import Compiler

                self._compiler = Compiler(
                    self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
                )
            return self._compiler

    def thinking_guide(self, budget: int, token_ids: list[int]) -> "ThinkingBudget":
        """A guide that limits the reasoning of one completion of this prompt."""
        from nanovllm.engine.thinking import ThinkingBudget, thinking_tokens

        return ThinkingBudget(thinking_tokens(self._tokenizer, self._vocab_size), budget, token_ids)

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, at the start of a text and after a space."""
        spellings = [form for word in params.bad_words or () for form in (word, " " + word.lstrip())]
        words = (tuple(self._tokenizer.encode(form, add_special_tokens=False)) for form in spellings)
        # the tokenizer may have tokens that are not in the model's vocabulary
        return tuple(dict.fromkeys(word for word in words if word and max(word) < self._vocab_size))
