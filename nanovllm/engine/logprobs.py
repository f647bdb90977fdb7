"""The log probabilities of a position, in the form of a request's output."""

from nanovllm.outputs import Logprob
from nanovllm.plan import TokenLogprobs
from nanovllm.text.tokenizer import Tokenizer


def to_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    return by_token(list(entry.token_ids), list(entry.logprobs), entry.rank, decoded(entry, tokenizer))


def decoded(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> list[str]:
    """The text of each token; nothing without a tokenizer."""
    return [] if tokenizer is None else [tokenizer.decode_token(token) for token in entry.token_ids]


def by_token(token_ids: list[int], logprobs: list[float], rank: int, texts: list[str]) -> dict[int, Logprob]:
    """By token id: the chosen token, which has this rank, then the most likely ones in order."""
    ranks = [rank, *range(1, len(token_ids))]
    shown: list[str] | list[None] = texts or [None] * len(ranks)
    found: dict[int, Logprob] = {}
    for token_id, logprob, rank, text in zip(token_ids, logprobs, ranks, shown, strict=True):
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found
