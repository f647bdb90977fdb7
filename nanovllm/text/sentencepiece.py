"""The bytes of a token in a vocabulary made by SentencePiece, by the decoder that tokenizer.json describes."""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import CheckpointError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Decoding error handler that writes one U+FFFD per invalid byte; "replace" writes one per invalid sequence."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("nanovllm.replace_each_byte", _replace_each_byte)


@dataclass(frozen=True)
class SentencePieceRules:
    """How the decoder turns one token into text."""

    replacements: tuple[tuple[str, str], ...] = ()  # (old, new), applied to every token
    byte_fallback: bool = False  # the token "<0x0A>" stands for the byte 10
    strips_first_space: bool = False  # remove one leading space of the text
    drops_in_first_token: str = ""  # the character for a space, if it is removed from the first token

    @property
    def trims_start(self) -> bool:
        return self.strips_first_space or bool(self.drops_in_first_token)

    @property
    def errors(self) -> str:
        return "nanovllm.replace_each_byte" if self.byte_fallback else "replace"

    def piece(self, token: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token.encode()

    def piece_at_start(self, token: str) -> bytes:
        if self.drops_in_first_token:
            token = token.replace(self.drops_in_first_token, "")
        piece = self.piece(token)
        return piece.removeprefix(b" ") if self.strips_first_space else piece


def read_decoder(decoder: dict[str, Any], steps: Sequence[Any]) -> SentencePieceRules:
    """The rules of a decoder made of these steps, one of the forms in which SentencePiece is written."""
    replacements: list[tuple[str, str]] = []
    rules: dict[str, Any] = {}
    fused = stripped = False
    for step in steps:
        match step:
            # Replacing a single character can be done per token and in any order with the steps before it. The one
            # difference: a "▁" that is spelled as byte tokens is not replaced here.
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                len(old) == 1 and not stripped
            ):
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if not fused:
                replacements.append((old, " "))
                if step.get("prepend_scheme") != "never":
                    rules["drops_in_first_token"] = old
            case {"type": "ByteFallback"}:
                rules["byte_fallback"] = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                stripped = rules["strips_first_space"] = start == 1
            case _:
                raise CheckpointError(
                    f"tokenizer.json: decoder {json.dumps(decoder, ensure_ascii=False)} cannot be streamed; supported "
                    "are ByteLevel, and sequences of Replace (one character), Metaspace, ByteFallback, Fuse, Strip "
                    "(one leading space)"
                )
    return SentencePieceRules(replacements=tuple(replacements), **rules)
