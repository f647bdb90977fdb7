"""Logprobs in the formats of the chat and the completions API."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.deltas import TokenScores

MIN_LOGPROB = -9999.0  # stands for -infinity, which JSON cannot express


class TokenFormatter:
    """Shows tokens as text, or as "token_id:123" if the client asked for ids or there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._pieces = None if tokenizer is None else tokenizer.pieces(skip_special_tokens=False)
        self._as_ids = as_ids

    def text(self, scores: "TokenScores", position: int) -> str:
        """The token at `position` of the scores: 0 is the sampled token, the others are the most likely ones."""
        if self._as_ids or not scores.tokens:
            return f"token_id:{scores.token_ids[position]}"
        return scores.tokens[position]

    def token(self, token_id: int) -> str:
        """A token that has no scores."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode_token(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's bytes, which may be only a part of a character."""
        return None if self._pieces is None else list(self._pieces[token_id])


def chat_logprobs(entries: "Sequence[TokenScores]", formatter: TokenFormatter, num_top: int) -> list[dict[str, Any]]:
    """The logprobs of generated tokens in the format of the chat API, each with the `num_top` most likely tokens."""

    def one(scores: "TokenScores", position: int) -> dict[str, Any]:
        return {
            "token": formatter.text(scores, position),
            "logprob": max(scores.logprobs[position], MIN_LOGPROB),
            "bytes": formatter.bytes(scores.token_ids[position]),
        }

    return [
        {**one(scores, 0), "top_logprobs": [one(scores, i) for i in range(1, len(scores.token_ids))][:num_top]}
        for scores in entries
    ]


class CompletionLogprobs:
    """The logprobs of one completion in the format of /v1/completions: four parallel lists.

    Text offsets continue from one call of `format` to the next.
    """

    def __init__(self, formatter: TokenFormatter) -> None:
        self._formatter = formatter
        self._offset = 0

    def format(self, entries: "Sequence[TokenScores | None]", first_token: str = "") -> dict[str, Any]:
        """The four lists for the next tokens. None stands for the first token of the prompt, which has no scores."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for scores in entries:
            token = first_token if scores is None else self._formatter.text(scores, 0)
            tokens.append(token)
            logprobs.append(None if scores is None else max(scores.logprobs[0], MIN_LOGPROB))
            tops.append(None if scores is None else self._top(scores))
            offsets.append(self._offset)
            self._offset += len(token)
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}

    def _top(self, scores: "TokenScores") -> dict[str, float]:
        """The most likely tokens, and the sampled token, which may not be one of them."""
        order = [*range(1, len(scores.token_ids)), 0]
        return {self._formatter.text(scores, i): max(scores.logprobs[i], MIN_LOGPROB) for i in order}


def concatenated(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate results of `CompletionLogprobs.format`."""
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
