"""Check, compile and cache the grammars of structured outputs."""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.structured.compile_sandbox import CompileSandbox, SandboxNotStartedError
from nanovllm.structured.exact import exact_schema
from nanovllm.structured.grammar import LIMITS, Grammar
from nanovllm.structured.lark import check_lark
from nanovllm.structured_outputs import grammar_source
from nanovllm.text.tokenizer import Tokenizer

CACHE_BYTES = 256 << 20


class Compiler:
    """Compiles grammars for one model's vocabulary. Safe to share between threads; compiles in the calling thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if not eos_token_ids:
            raise RequestError(
                "structured_outputs: the model has no end-of-sequence token, so a completion could not end when its "
                "grammar is complete"
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size  # of the model; the tokenizer may have fewer tokens, or more
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        added = tokenizer.backend.get_added_tokens_decoder()
        eos_tokens = {token: text for token in eos_token_ids if (text := tokenizer.id_to_token(token)) is not None}
        self._sandbox = CompileSandbox(
            vocab_size=max(vocab_size, tokenizer.vocab_size),
            special_tokens=eos_tokens | {token: entry.content for token, entry in added.items()},
            eos_token_id=self._eos_token_ids[0],
            limits=LIMITS,
        )
        self._cache = GrammarCache(cache_bytes)

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """The grammar for `spec`, from the cache if possible. A RequestError names what is not supported."""
        source = grammar_source(vars(spec))
        result = self._cache.get(source)
        if result is None:
            try:
                result = self._build(*source)
            except SandboxNotStartedError:
                raise  # another time it may start
            except RequestError as error:
                result = str(error)
            self._cache.put(source, result)
        if isinstance(result, str):
            raise RequestError(result)
        return result

    def _build(self, kind: str, text: str) -> Grammar:
        if kind == "json":
            text = json.dumps(exact_schema(json.loads(text)))
        if kind == "grammar":
            check_lark(text)
        translated = self._sandbox.translate(kind, text)
        try:
            grammar = Grammar(
                translated,
                self._llguidance_vocabulary(),
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
            )
        except ValueError as error:
            raise RequestError(f"{kind}: {error}") from None
        if grammar.guide().mask_after(()) is None:
            raise RequestError(
                f"{kind}: the tokens that may come first cannot be computed within the limits on work; simplify it"
            )
        return grammar

    def _llguidance_vocabulary(self) -> Any:
        """The tokenizer in llguidance's form. Made once, because it takes a second for a large vocabulary."""
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
        """End the compile process."""
        self._sandbox.close()


class GrammarCache:
    """An LRU cache of grammars, or of error messages for those that were refused, with a limit in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], Grammar | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """The estimated size of all entries, keys included."""
        return sum(
            len(kind) + len(text) + (len(result) if isinstance(result, str) else result.num_bytes)
            for (kind, text), result in self._entries.items()
        )

    def get(self, source: tuple[str, str]) -> Grammar | str | None:
        with self._lock:
            if source in self._entries:
                self._entries.move_to_end(source)
                self._trim()
            return self._entries.get(source)

    def put(self, source: tuple[str, str], result: Grammar | str) -> None:
        with self._lock:
            self._entries[source] = result
            self._entries.move_to_end(source)
            self._trim()

    def _trim(self) -> None:
        """Evict the least recently used entries until the limit holds. Also called by `get`: grammars grow with use."""
        while len(self._entries) > 1 and self.num_bytes > self._max_bytes:
            self._entries.popitem(last=False)
