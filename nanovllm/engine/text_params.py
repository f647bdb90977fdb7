"""Sampling parameters that need the tokenizer: bad words, structured outputs and the budget of reasoning."""

import threading
from typing import TYPE_CHECKING

from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.guide import Guide
    from nanovllm.structured.compiler import Compiler
    from nanovllm.text.tokenizer import Tokenizer


class TextParams:
    def __init__(self, tokenizer: "Tokenizer", *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
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
                    self.tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
                )
            return self._compiler

    def apply(self, params: SamplingParams, seqs: list[Sequence], token_ids: list[int]) -> None:
        """Give the sequences of one request their bad words and guides. `token_ids`: of the prompt."""
        bad_words = self._bad_words(params)
        for seq in seqs:
            seq.bad_words = bad_words
            if params.structured_outputs is not None:
                seq.guide = self.compiler.compile(params.structured_outputs).guide(ignore_eos=params.ignore_eos)
                seq.stop_token_ids |= self._eos_token_ids  # a complete grammar ends even with ignore_eos
            elif params.thinking_token_budget is not None:
                seq.guide = self._thinking_guide(params.thinking_token_budget, token_ids)

    def _thinking_guide(self, budget: int, token_ids: list[int]) -> "Guide":
        """A guide that limits the reasoning of one completion of this prompt."""
        from nanovllm.engine.thinking import ThinkingBudget, thinking_tokens

        return ThinkingBudget(thinking_tokens(self.tokenizer, self._vocab_size), budget, token_ids)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, at the start of a text and after a space."""
        spellings = [form for word in params.bad_words or () for form in (word, " " + word.lstrip())]
        words = (tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in spellings)
        # the tokenizer may have tokens that are not in the model's vocabulary
        return tuple(dict.fromkeys(word for word in words if word and max(word) < self._vocab_size))


def refusal_without_tokenizer(params: SamplingParams) -> RequestError:
    """The error for parameters that need the tokenizer, in an engine that has none."""
    if params.stop or params.bad_words:
        return RequestError("stop and bad_words are text, and skip_tokenizer_init=True leaves none: use token ids")
    if params.structured_outputs is not None:
        return RequestError("structured_outputs need a tokenizer, and skip_tokenizer_init=True leaves none")
    return RequestError("thinking_token_budget: needs a tokenizer, and skip_tokenizer_init=True leaves none")
