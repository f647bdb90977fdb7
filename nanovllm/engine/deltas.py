"""What is new of a completion since it was last reported; the form in which streams are sent to other processes."""

import msgspec


class TokenScores(msgspec.Struct, array_like=True, gc=False):
    """One position: the chosen token first, then the most likely ones in order (the chosen may be among them)."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token; 1 = most likely
    tokens: list[str]  # decoded; empty where there is no tokenizer


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What is new of one completion since its last delta."""

    request_id: str
    index: int  # which of the n completions
    text: str
    token_ids: list[int]
    logprobs: list[TokenScores] | None = None  # one entry a new token, where asked for
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop string or stop token id; None for end-of-sequence
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    prompt_logprobs: list[TokenScores | None] | None = None  # on a request's first delta, where asked for
    queue_seconds: float | None = None  # on a request's first delta: from its arrival to its first step
