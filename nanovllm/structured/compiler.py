"""From what a user asks of an answer's form to a grammar that can be followed: checked, compiled, cached."""

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.structured.grammar import LIMITS, Grammar
from nanovllm.structured.lark import check_lark
from nanovllm.structured.schema import ESCAPES, check_schema
from nanovllm.structured.trial import Trial
from nanovllm.text.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20


class Compiler:
    """One model's grammars. Safe to share between threads; the work is done in the thread that calls."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if not eos_token_ids:
            raise RequestError("structured_outputs: the model names no end-of-sequence token, and so no answer ends")
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size  # of the model; the tokenizer may know fewer tokens, or more
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        added = tokenizer.backend.get_added_tokens_decoder()
        ends = {token: text for token in eos_token_ids if (text := tokenizer.id_to_token(token)) is not None}
        self._trial = Trial(
            vocab_size=max(vocab_size, tokenizer.vocab_size),
            special_tokens=ends | {token: entry.content for token, entry in added.items()},
            eos_token_id=self._eos_token_ids[0],
            limits=LIMITS,
        )
        self._cache = GrammarCache(cache_bytes)

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """The grammar of a form, or a RequestError that says what in it cannot be honoured."""
        found = self._cache.get(spec.source)
        if found is None:
            try:
                found = self._build(*spec.source)
            except RequestError as error:
                found = str(error)
            self._cache.put(spec.source, found)
        if isinstance(found, str):
            raise RequestError(found)
        return found

    def _build(self, kind: str, text: str) -> Grammar:
        if kind == "json":
            check_schema(text)
        if kind == "grammar":
            check_lark(text)
        translated = self._trial.translate(kind, text, ESCAPES)
        try:
            grammar = Grammar(
                translated,
                self._llguidance_vocabulary(),
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
            )
        except ValueError as error:
            raise RequestError(f"{kind}: {error}") from None
        if grammar.guide().mask_behind(()) is None:
            raise RequestError(
                f"{kind}: how such an answer begins cannot be told within the limits on work: simplify it"
            )
        return grammar

    def _llguidance_vocabulary(self) -> Any:
        """llguidance's own view of the tokenizer: made once, as it takes a second for a large vocabulary."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(
                    self._tokenizer.backend.to_str(),
                    n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                    eos_token=self._eos_token_ids,
                )
            return self._vocabulary

    def close(self) -> None:
        self._trial.close()


class GrammarCache:
    """The grammars, or refusals, asked for last, as many as fit into a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, str], Grammar | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def num_bytes(self) -> int:
        return sum(
            len(kind) + len(text) + (len(found) if isinstance(found, str) else found.num_bytes)
            for (kind, text), found in self._found.items()
        )

    def get(self, source: tuple[str, str]) -> Grammar | str | None:
        with self._lock:
            if source in self._found:
                self._found.move_to_end(source)
                self._trim()
            return self._found.get(source)

    def put(self, source: tuple[str, str], found: Grammar | str) -> None:
        with self._lock:
            self._found[source] = found
            self._found.move_to_end(source)
            self._trim()

    def _trim(self) -> None:
        """Down to the limit, oldest first; grammars grow with use, so this can come at any time."""
        while len(self._found) > 1 and self.num_bytes > self._max_bytes:
            self._found.popitem(last=False)
