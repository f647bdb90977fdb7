"""The bytes that each token adds to a text, and whole texts made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

    from nanovllm.text.sentencepiece import SentencePieceRules


class TokenPieces(dict[int, bytes]):
    """Maps a token id to the bytes that the token adds to a text. The pieces joined and decoded as UTF-8 are the text.

    Entries are computed when they are first read. A skipped token and an unknown id have an empty piece.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, rules: ByteLevelRules | SentencePieceRules, skipped_ids: frozenset[int]
    ) -> None:
        self._backend = backend
        self._rules = rules
        self._skipped_ids = skipped_ids
        self.errors = rules.errors  # error handler for decoding bytes that are not valid UTF-8
        self._trims_start = rules.trims_start  # True if the first token of a text loses its leading space

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._rules.piece(self._token(token_id))
        return piece

    def at_start(self, token_id: int) -> bytes:
        """The piece of a token that begins the text."""
        return self._rules.piece_at_start(self._token(token_id))

    def trims_start_after(self, prompt_token_ids: Sequence[int]) -> bool:
        """True if no text precedes a completion of this prompt, so that its first token loses its leading space."""
        return self._trims_start and not any(self[token_id] for token_id in reversed(prompt_token_ids))

    def text(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """The whole text of a finished completion; equal to that of a `Detokenizer` without stop strings."""
        parts = list(map(self.__getitem__, token_ids))
        if self.trims_start_after(prompt_token_ids):
            first = next((i for i, part in enumerate(parts) if part), None)
            if first is not None:
                parts[first] = self.at_start(token_ids[first])
        return b"".join(parts).decode("utf-8", self.errors)

    def _token(self, token_id: int) -> str:
        return "" if token_id in self._skipped_ids else self._backend.id_to_token(token_id) or ""


def _byte_alphabet() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte.

    A printable byte is written as the character of the same number, the others as the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class ByteLevelRules:
    """The decoder of a byte-level vocabulary: each character of a token stands for one byte."""

    errors = "replace"
    trims_start = False

    def piece(self, token: str) -> bytes:
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token: its text is written unchanged
            return token.encode()

    def piece_at_start(self, token: str) -> bytes:
        return self.piece(token)


def read_rules(backend: tokenizers.Tokenizer) -> ByteLevelRules | SentencePieceRules:
    """How the decoder of tokenizer.json turns one token into text."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps: list[Any] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelRules()
    from nanovllm.text.sentencepiece import read_decoder

    return read_decoder(decoder, steps)
