"""Deltas: what is new in a completion since it was last reported, as it is sent to other processes."""

import msgspec


class TokenScores(msgspec.Struct, array_like=True, gc=False):
    """Logprobs of one position: the sampled token first, then the most likely ones in order, which may include it.

    With `SamplingParams.logprob_token_ids` the others are these tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the sampled token; 1 = most likely
    tokens: list[str]  # decoded; empty without a tokenizer


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What is new in one completion since its last delta."""

    request_id: str
    index: int  # which of the n completions
    text: str
    token_ids: list[int]
    logprobs: list[TokenScores] | None = None  # one entry per new token, if requested
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop string or stop token id; None for end-of-sequence
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    prompt_logprobs: list[TokenScores | None] | None = None  # on a request's first delta, if requested
    queue_seconds: float | None = None  # on a request's first delta: from its arrival to its first step
