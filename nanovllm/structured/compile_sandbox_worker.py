"""The child process of `CompileSandbox`, run as a script: translates grammars and compiles each once, within limits.

Reads one JSON request per line from stdin and writes one JSON reply per line. The first line has the settings: special
tokens and limits; the reply to it says that the process is ready. Apart from special tokens the vocabulary is single
bytes, because the time to compile a grammar does not depend on the vocabulary.
"""

import json
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from


class ByteVocabulary:
    """A vocabulary of single bytes and special tokens, with the attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, vocab_size: int, special_tokens: dict[int, str], eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = list(special_tokens)
        single_bytes = (bytes([byte]) for byte in range(256))
        self.tokens: Sequence[bytes] = [
            special_tokens[token].encode() if token in special_tokens else next(single_bytes, b"")
            for token in range(max(vocab_size, 256 + len(special_tokens)))
        ]

    def __call__(self, text: bytes) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in text]


def translate(kind: str, text: str) -> str:
    """Translate a grammar into llguidance's own language."""
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(choices)}")
    return grammar_from("grammar", text)


def compile_once(grammar: str, tokenizer: LLTokenizer, limits: LLParserLimits) -> None:
    """Compile a grammar and compute its first mask; ValueError if either fails."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())


def handle(request: dict[str, str], tokenizer: LLTokenizer, limits: LLParserLimits) -> dict[str, str]:
    """The reply to one request: {"grammar": text}, or {"refusal": reason}."""
    try:
        grammar = translate(request["kind"], request["text"])
        compile_once(grammar, tokenizer, limits)
    except (ValueError, RecursionError) as error:
        return {"refusal": str(error) or type(error).__name__}
    return {"grammar": grammar}


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    special = {int(token): text for token, text in settings["special_tokens"].items()}
    vocabulary = ByteVocabulary(settings["vocab_size"], special, settings["eos_token_id"])
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), slices=[])
    limits = LLParserLimits(**settings["limits"])
    resource.setrlimit(resource.RLIMIT_AS, (settings["memory_bytes"],) * 2)
    print("{}", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])  # SIGPROF has no handler: it ends the process
        reply = handle(json.loads(line), tokenizer, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
