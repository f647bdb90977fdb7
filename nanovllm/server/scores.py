"""Logprobs in the formats of the chat and the completions API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.server.text_offsets import TextOffsets, prompt_offsets
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.deltas import TokenScores

MIN_LOGPROB = -9999.0  # stands for -infinity, which JSON cannot express


class TokenFormatter:
    """Shows tokens as text, or as "token_id:123" if the client asked for ids or there is no tokenizer.

    A token that is only a part of a character has no text. As in the OpenAI API it is shown as "bytes:" and its bytes:
    ASCII as it is, the others as \\x and two digits.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._pieces = None if tokenizer is None else tokenizer.pieces(skip_special_tokens=False)
        self._as_ids = as_ids

    def token(self, token_id: int) -> str:
        if self._as_ids or self._pieces is None:
            return f"token_id:{token_id}"
        piece = self._pieces[token_id]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + piece.decode("ascii", "backslashreplace")

    def distinct(self, token_ids: Sequence[int]) -> dict[int, str]:
        """The tokens by id, all different: a token that looks like an earlier one is shown as its id."""
        shown: dict[int, str] = {}
        taken: set[str] = set()
        for token_id in dict.fromkeys(token_ids):
            token = self.token(token_id)
            shown[token_id] = f"token_id:{token_id}" if token in taken else token
            taken.add(shown[token_id])
        return shown

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's bytes, which may be only a part of a character."""
        return None if self._pieces is None else list(self._pieces[token_id])


def chat_logprobs(
    entries: "Sequence[TokenScores]", formatter: TokenFormatter, num_top: int | None
) -> list[dict[str, Any]]:
    """The logprobs of generated tokens in the format of the chat API, each with the `num_top` most likely tokens.

    With None, each has the tokens that the request names and, as in vLLM, the sampled token.
    """

    def one(scores: "TokenScores", position: int) -> dict[str, Any]:
        return {
            "token": formatter.token(scores.token_ids[position]),
            "logprob": max(scores.logprobs[position], MIN_LOGPROB),
            "bytes": formatter.bytes(scores.token_ids[position]),
        }

    def others(scores: "TokenScores") -> list[int]:
        sampled, *rest = scores.token_ids
        positions = list(range(1, len(scores.token_ids)))
        return positions[:num_top] if num_top is not None or sampled in rest else [0, *positions]

    return [
        {**one(scores, 0), "top_logprobs": [one(scores, position) for position in others(scores)]} for scores in entries
    ]


@dataclass(slots=True)
class _Entry:
    """One token in the format of /v1/completions."""

    offset: int
    token: str
    logprob: float | None
    top: dict[str, float] | None


class CompletionLogprobs:
    """The logprobs of one completion in the format of /v1/completions: four parallel lists.

    A token's offset is where its text starts in the text of the completion, after the prompt if that is echoed. Tokens
    of one character have the same offset. Tokens whose text is held back, because it may belong to a stop string, are
    held back too: if it does, their text is cut off and they are at the end of the text.
    """

    def __init__(
        self,
        formatter: TokenFormatter,
        tokenizer: Tokenizer | None,
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._formatter = formatter
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._offsets = TextOffsets(
            tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._text_length = 0  # of what has been returned
        self._held: list[_Entry] = []

    def echo(self, text: str, entries: "Sequence[TokenScores | None]") -> dict[str, Any]:
        """The four lists for the prompt, which begins the completion as `text`. Its first token has no scores."""
        self._text_length = self._offsets.offset = len(text)
        starts = prompt_offsets(self._tokenizer, text, self._prompt_token_ids)
        tokens = zip(starts, self._prompt_token_ids, entries, strict=True)
        return _lists([self._entry(offset, token_id, scores) for offset, token_id, scores in tokens])

    def format(self, text: str, entries: "Sequence[TokenScores]", *, finished: bool) -> dict[str, Any] | None:
        """The four lists for the next tokens and the text that came with them; None if all are held back."""
        self._text_length += len(text)
        length = self._text_length
        for scores in entries:
            token_id = scores.token_ids[0]
            self._held.append(self._entry(self._offsets.take(token_id), token_id, scores))
        released = [entry for entry in self._held if finished or entry.offset <= length]
        del self._held[: len(released)]
        for entry in released:
            entry.offset = min(entry.offset, length)
        return _lists(released) if released else None

    def _entry(self, offset: int, token_id: int, scores: "TokenScores | None") -> _Entry:
        if scores is None:
            return _Entry(offset, self._formatter.token(token_id), None, None)
        return _Entry(offset, self._formatter.token(token_id), max(scores.logprobs[0], MIN_LOGPROB), self._top(scores))

    def _top(self, scores: "TokenScores") -> dict[str, float]:
        """The most likely tokens, and the sampled token, which may not be one of them."""
        order = [*range(1, len(scores.token_ids)), 0]
        shown = self._formatter.distinct([scores.token_ids[i] for i in order])
        return {shown[scores.token_ids[i]]: max(scores.logprobs[i], MIN_LOGPROB) for i in order}


def _lists(entries: Sequence[_Entry]) -> dict[str, Any]:
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": [entry.token for entry in entries],
        "top_logprobs": [entry.top for entry in entries],
    }


def concatenated(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate results of `CompletionLogprobs.echo` and `format`."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def prompt_logprobs(entries: "Sequence[TokenScores | None] | None") -> list[dict[int, Any] | None] | None:
    """The prompt's logprobs in vLLM's format: for each token of the prompt, the candidates by token id."""
    if entries is None:
        return None
    return [None if scores is None else _by_id(scores) for scores in entries]


def _by_id(scores: "TokenScores") -> dict[int, Any]:
    candidates: dict[int, Any] = {}
    for position, token_id in enumerate(scores.token_ids):
        rank = position or scores.rank
        text = scores.tokens[position] if scores.tokens else None
        candidates.setdefault(
            token_id, {"logprob": max(scores.logprobs[position], MIN_LOGPROB), "rank": rank, "decoded_token": text}
        )
    return candidates
