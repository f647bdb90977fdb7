"""The log probabilities of a request's tokens, in the form of its output."""

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob
from nanovllm.plan import TokenLogprobs
from nanovllm.text.tokenizer import Tokenizer


def add_logprobs(
    output: CompletionOutput, seq: Sequence, tokenizer: Tokenizer | None, *, known: list[dict[int, Logprob]]
) -> None:
    """Add the logprobs of all tokens to a completion's output. `known`: those of its first tokens; it is extended."""
    ranked = not seq.params.logprob_token_ids
    known += [to_logprobs(entry, tokenizer, ranked=ranked) for entry in seq.logprobs[len(known) :]]
    output.logprobs = list(known)
    output.cumulative_logprob = sum(entry.logprobs[0] for entry in seq.logprobs)


def prompt_logprobs(seq: Sequence, tokenizer: Tokenizer | None) -> list[dict[int, Logprob] | None]:
    """The logprobs of the prompt's tokens, None for the first, which nothing predicts."""
    return [None, *(to_logprobs(entry, tokenizer) for entry in seq.prompt_logprobs)]


def to_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None, *, ranked: bool = True) -> dict[int, Logprob]:
    texts = decoded(entry, tokenizer)
    return by_token(list(entry.token_ids), list(entry.logprobs), entry.rank, texts, ranked=ranked)


def decoded(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> list[str]:
    """The text of each token; nothing without a tokenizer."""
    return [] if tokenizer is None else [tokenizer.decode_token(token) for token in entry.token_ids]


def by_token(
    token_ids: list[int], logprobs: list[float], rank: int, texts: list[str], *, ranked: bool = True
) -> dict[int, Logprob]:
    """By token id: the chosen token, which has this rank, then the others.

    `ranked`: they are the most likely ones in order. If not, their ranks are not known.
    """
    others = range(1, len(token_ids)) if ranked else [None] * (len(token_ids) - 1)
    ranks: list[int | None] = [rank, *others]
    shown: list[str] | list[None] = texts or [None] * len(ranks)
    found: dict[int, Logprob] = {}
    for token_id, logprob, own_rank, text in zip(token_ids, logprobs, ranks, shown, strict=True):
        found.setdefault(token_id, Logprob(logprob, own_rank, text))
    return found
