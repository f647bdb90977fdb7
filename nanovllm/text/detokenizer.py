"""The text of one completion while its tokens arrive: whole characters only, stop strings found and never shown.

A token adds a fixed piece of bytes to the text (`Tokenizer.pieces`), so it costs the same however long the text is: its
bytes go through an incremental UTF-8 decoder, its characters through one automaton per stop string.

The text equals `Tokenizer.decode` of the same tokens, with one exception. In a vocabulary with byte fallback, one bad
byte makes `tokenizers` give up the whole run of byte tokens around it; here the good characters of the run, which may
have been shown already, stay.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from nanovllm.errors import RequestError
from nanovllm.text.tokenizer import Tokenizer, TokenPieces


class Detokenizer:
    """Feed tokens with `append`, read the whole `text` or `take_new`, and `finish` when no more come."""

    __slots__ = (
        "_at_start",
        "_fresh",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_pieces",
        "_stop_starts",
        "_stops",
        "_text",
        "_unfinished",
        "num_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,  # a stop string that is complete within so many tokens is no stop
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self.num_tokens = 0  # taken in, up to and including the one that completed a stop string
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._stops = [_StopString(text) for text in stop]
        self._stop_starts = frozenset(text[0] for text in stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._at_start = _trims_start(self._pieces, prompt_token_ids)
        self._unfinished = b""  # the first bytes of a character
        self._held = ""  # characters that may turn out to be a stop string
        self._fresh: list[str] = []  # shown, not yet part of _text
        self._text = ""

    @property
    def text(self) -> str:
        """What may be shown now, less what `take_new` gave away; it only ever grows."""
        if self._fresh:
            self._text += "".join(self._fresh)
            self._fresh.clear()
        return self._text

    def take_new(self) -> str:
        """What may be shown and was not taken yet. It is not kept: so it costs the same however long the text is."""
        new = "".join(self._fresh)
        self._fresh.clear()
        return new

    def append(self, token_ids: Iterable[int]) -> str | None:
        """Take in sampled tokens; the stop string they complete, if any, ends the text and leaves later tokens out."""
        for token_id in token_ids:
            self.num_tokens += 1
            new = self._characters(token_id)
            if not self._held and self._stop_starts.isdisjoint(new):
                self._fresh.append(new)
            elif (stop := self._show_until_stop(new)) is not None:
                return stop
        return None

    def finish(self) -> None:
        """Show what was held back: no more tokens come."""
        rest, _ = utf_8_decode(self._unfinished, self._pieces.errors, True)
        self._fresh.append(self._held + rest)
        self._held, self._unfinished = "", b""

    def _characters(self, token_id: int) -> str:
        """The characters that this token completes."""
        piece = self._pieces[token_id]
        if self._at_start and piece:
            piece = self._pieces.at_start(token_id)
            self._at_start = False
        if self._unfinished:
            piece = self._unfinished + piece
        characters, num_used = utf_8_decode(piece, self._pieces.errors)
        self._unfinished = piece[num_used:]
        return characters

    def _show_until_stop(self, new: str) -> str | None:
        """Show the text up to the stop string that `new` completes, or else all that can be no part of one."""
        text = self._held + new
        hits = [(end - len(stop.text), stop.text) for stop in self._stops if (end := stop.feed(new)) is not None]
        if hits and self.num_tokens > self._min_tokens:
            start, hit = min(hits, key=lambda hit: hit[0])
            num_shown = len(self._held) + start + (len(hit) if self._include_stop else 0)
            self._fresh.append(text[:num_shown])
            self._held, self._unfinished = "", b""
            return hit
        num_shown = len(text) - max(stop.num_matched for stop in self._stops)
        self._fresh.append(text[:num_shown])
        self._held = text[num_shown:]
        return None


class _StopString:
    """Knuth-Morris-Pratt search in a text that arrives in parts."""

    __slots__ = ("_fallback", "num_matched", "text")

    def __init__(self, text: str) -> None:
        if not text:
            raise RequestError("stop holds an empty string, which every text contains; leave it out")
        self.text = text
        self.num_matched = 0  # length of the longest end of the text that is a proper prefix of the stop string
        self._fallback = _borders(text)

    def feed(self, new: str) -> int | None:
        """Where in `new` the first occurrence that it completes ends."""
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
    """For each prefix length of `text`, the longest proper prefix of that prefix that is also its end."""
    borders = [0, 0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length]
        borders.append(length + (text[length] == char))
    return borders


def detokenize_all(
    tokenizer: Tokenizer, prompt_tail_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool
) -> str:
    """The finished text at once: what a `Detokenizer` without stop strings ends with."""
    pieces = tokenizer.pieces(skip_special_tokens)
    parts = list(map(pieces.__getitem__, token_ids))
    if _trims_start(pieces, prompt_tail_ids):
        first = next((i for i, part in enumerate(parts) if part), None)
        if first is not None:
            parts[first] = pieces.at_start(token_ids[first])
    return b"".join(parts).decode("utf-8", pieces.errors)


def _trims_start(pieces: TokenPieces, prompt_token_ids: Sequence[int]) -> bool:
    """Whether the completion begins the text, so that its first token loses its space."""
    return pieces.trims_start and not any(pieces[token_id] for token_id in reversed(prompt_token_ids))
