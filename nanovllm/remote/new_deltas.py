"""Reads what is new of a request, for streams to other processes. The cost does not grow with the completions.

A request is read this way or with `Request.output`, not with both: text that was in a delta is not kept.
"""

from nanovllm.engine.deltas import Delta, TokenScores
from nanovllm.engine.logprobs import decoded
from nanovllm.engine.request import Completion, Request
from nanovllm.plan import TokenLogprobs
from nanovllm.text.tokenizer import Tokenizer


def new_deltas(request: Request, eos_token_ids: frozenset[int]) -> list[Delta]:
    """What is new of each completion since the last call."""
    parts = request.completions
    texts = [part.growing for part in parts if part.growing is not None]
    is_first = not texts[0].num_sent_tokens and not any([text.num_sent_tokens or text.end_sent for text in texts])
    found = [delta for part in parts if (delta := _new_delta(part, eos_token_ids)) is not None]
    for delta in found:
        delta.num_cached_tokens = parts[0].seq.num_cached_tokens
    if found and is_first:
        _add_prompt_results(found[0], request)
    return found


def _new_delta(completion: Completion, eos_token_ids: frozenset[int]) -> Delta | None:
    seq, growing = completion.seq, completion.growing
    assert growing is not None, "the request is streamed"
    num_sent = growing.num_sent_tokens
    if growing.end_sent or (not seq.finished and seq.num_completion_tokens == num_sent):
        return None
    scores = None
    if seq.params.logprobs is not None:
        scores = [_scores(entry, completion.tokenizer) for entry in seq.logprobs[num_sent:]]
    growing.num_sent_tokens = seq.num_completion_tokens
    growing.end_sent = seq.finished
    return Delta(
        request_id=seq.request_id,
        index=seq.index,
        text=growing.take_new(),
        token_ids=seq.token_ids[seq.num_prompt_tokens + num_sent :],
        logprobs=scores,
        finish_reason=seq.finish_reason,
        stop_reason=completion.stop_reason(eos_token_ids),
    )


def _add_prompt_results(first: Delta, request: Request) -> None:
    if request.params.prompt_logprobs is not None:
        entries = request.completions[0].seq.prompt_logprobs
        first.prompt_logprobs = [None, *(_scores(entry, request.tokenizer) for entry in entries)]
    if request.metrics.first_scheduled_time is not None:
        first.queue_seconds = request.metrics.first_scheduled_time - request.metrics.arrival_time


def _scores(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> TokenScores:
    return TokenScores(list(entry.token_ids), list(entry.logprobs), entry.rank, decoded(entry, tokenizer))
