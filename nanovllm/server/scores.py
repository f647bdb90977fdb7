"""Log-probabilities in the shapes of the two APIs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.deltas import TokenScores

LOWEST = -9999.0  # JSON knows no infinity


class Speller:
    """Tokens as a client wants to see them."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._pieces = None if tokenizer is None else tokenizer.pieces(skip_special_tokens=False)
        self._as_ids = as_ids

    def text(self, scores: "TokenScores", position: int) -> str:
        if self._as_ids or not scores.tokens:
            return f"token_id:{scores.token_ids[position]}"
        return scores.tokens[position]

    def one(self, token_id: int) -> str:
        """A token without scores."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode_token(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's own bytes: one token may hold a part of a character only."""
        return None if self._pieces is None else list(self._pieces[token_id])


def chat_logprobs(entries: "Sequence[TokenScores]", speller: Speller, num_top: int) -> list[dict[str, Any]]:
    def one(scores: "TokenScores", position: int) -> dict[str, Any]:
        return {
            "token": speller.text(scores, position),
            "logprob": max(scores.logprobs[position], LOWEST),
            "bytes": speller.bytes(scores.token_ids[position]),
        }

    return [
        {**one(scores, 0), "top_logprobs": [one(scores, i) for i in range(1, len(scores.token_ids))][:num_top]}
        for scores in entries
    ]


class CompletionLogprobs:
    """The four parallel lists of /v1/completions; offsets go on from one part of a text to the next."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._offset = 0

    def take(self, entries: "Sequence[TokenScores | None]", first_token: str = "") -> dict[str, Any]:
        """The lists for these tokens. None stands for a text's first token, which nothing predicts."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for scores in entries:
            token = first_token if scores is None else self._speller.text(scores, 0)
            tokens.append(token)
            logprobs.append(None if scores is None else max(scores.logprobs[0], LOWEST))
            tops.append(None if scores is None else self._top(scores))
            offsets.append(self._offset)
            self._offset += len(token)
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}

    def _top(self, scores: "TokenScores") -> dict[str, float]:
        """The most likely ones, and the chosen one, which need not be among them."""
        order = [*range(1, len(scores.token_ids)), 0]
        return {self._speller.text(scores, i): max(scores.logprobs[i], LOWEST) for i in order}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several parts of `CompletionLogprobs` as one."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def prompt_logprobs(entries: "Sequence[TokenScores | None] | None") -> list[dict[int, Any] | None] | None:
    """As vLLM writes them: for each token of the prompt, candidates by id."""
    if entries is None:
        return None
    return [None if scores is None else _by_id(scores) for scores in entries]


def _by_id(scores: "TokenScores") -> dict[int, Any]:
    found: dict[int, Any] = {}
    for position, token_id in enumerate(scores.token_ids):
        rank = position or scores.rank
        text = scores.tokens[position] if scores.tokens else None
        found.setdefault(
            token_id, {"logprob": max(scores.logprobs[position], LOWEST), "rank": rank, "decoded_token": text}
        )
    return found
