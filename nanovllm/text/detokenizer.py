"""Incremental detokenization of one completion: complete characters only, and stop strings are cut off.

Each token adds a fixed sequence of bytes to the text (`Tokenizer.pieces`), so the cost per token does not depend on the
length of the text: the bytes go through an incremental UTF-8 decoder, the characters through a matcher per stop string.

The text equals `Tokenizer.decode` of the same tokens, with one exception. In a vocabulary with byte fallback, an
invalid byte makes `tokenizers` replace the whole run of byte tokens around it. Here the valid characters of the run are
kept, because they may have been streamed already.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from nanovllm.errors import RequestError
from nanovllm.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text as they arrive.

    Add tokens with `append`, read with `text` or `take_new`, and call `finish` after the last token.
    """

    __slots__ = (
        "_at_start",
        "_held",
        "_include_stop",
        "_incomplete",
        "_min_tokens",
        "_new",
        "_pieces",
        "_stop_starts",
        "_stops",
        "_text",
        "num_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,  # stop strings that are complete within this many tokens are ignored
        prompt_token_ids: Sequence[int] = (),  # without text before it, the first token may lose its leading space
    ) -> None:
        self.num_tokens = 0  # tokens processed, up to and including the one that completed a stop string
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._stops = [_StopString(text) for text in stop]
        self._stop_starts = frozenset(text[0] for text in stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._at_start = self._pieces.trims_start_after(prompt_token_ids)
        self._incomplete = b""  # the first bytes of a character whose last byte has not arrived
        self._held = ""  # characters held back because they may be the beginning of a stop string
        self._new: list[str] = []  # released text that is not yet part of _text
        self._text = ""

    @property
    def text(self) -> str:
        """The text released so far, without what `take_new` returned. It only ever grows."""
        if self._new:
            self._text += "".join(self._new)
            self._new.clear()
        return self._text

    def take_new(self) -> str:
        """Return the text released since the last call. It is not stored, so the cost does not grow with the text."""
        new = "".join(self._new)
        self._new.clear()
        return new

    def append(self, token_ids: Iterable[int]) -> str | None:
        """Add sampled tokens. Returns the stop string that they complete, if any; later tokens are then ignored."""
        for token_id in token_ids:
            self.num_tokens += 1
            new = self._characters(token_id)
            if not self._held and self._stop_starts.isdisjoint(new):
                self._new.append(new)
            elif (stop := self._release_until_stop(new)) is not None:
                return stop
        return None

    def finish(self) -> None:
        """Release the text that was held back. Called after the last token."""
        rest, _ = utf_8_decode(self._incomplete, self._pieces.errors, True)
        self._new.append(self._held + rest)
        self._held, self._incomplete = "", b""

    def _characters(self, token_id: int) -> str:
        """The characters that this token completes."""
        piece = self._pieces[token_id]
        if self._at_start and piece:
            piece = self._pieces.at_start(token_id)
            self._at_start = False
        if self._incomplete:
            piece = self._incomplete + piece
        characters, num_used = utf_8_decode(piece, self._pieces.errors)
        self._incomplete = piece[num_used:]
        return characters

    def _release_until_stop(self, new: str) -> str | None:
        """Release the text up to the stop string that `new` completes and return that string.

        If no stop string is complete, release all characters that cannot belong to one and return None.
        """
        text = self._held + new
        hits = [(end - len(stop.text), stop.text) for stop in self._stops if (end := stop.feed(new)) is not None]
        if hits and self.num_tokens > self._min_tokens:
            start, hit = min(hits, key=lambda hit: hit[0])
            num_released = len(self._held) + start + (len(hit) if self._include_stop else 0)
            self._new.append(text[:num_released])
            self._held, self._incomplete = "", b""
            return hit
        num_released = len(text) - max(stop.num_matched for stop in self._stops)
        self._new.append(text[:num_released])
        self._held = text[num_released:]
        return None


class _StopString:
    """Knuth-Morris-Pratt search for one stop string in a text that arrives piece by piece."""

    __slots__ = ("_fallback", "num_matched", "text")

    def __init__(self, text: str) -> None:
        if not text:
            raise RequestError("stop contains an empty string, which every text contains; remove it")
        self.text = text
        self.num_matched = 0  # how many characters at the end of the text are the beginning of the stop string
        self._fallback = _borders(text)

    def feed(self, new: str) -> int | None:
        """The end, as an index into `new`, of the first occurrence that `new` completes; None if there is none."""
        first_end = None
        matched = self.num_matched
        for end, char in enumerate(new, 1):
            while matched and self.text[matched] != char:
                matched = self._fallback[matched]
            if self.text[matched] == char:
                matched += 1
            if matched == len(self.text):
                matched = self._fallback[matched]
                first_end = first_end or end
        self.num_matched = matched
        return first_end


def _borders(text: str) -> list[int]:
    """The KMP failure table: for each prefix of `text`, the length of its longest border (proper prefix and suffix)."""
    borders = [0, 0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length]
        borders.append(length + (text[length] == char))
    return borders
