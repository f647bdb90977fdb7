"""Sequences that end with one vector for their prompt: embeddings."""

from nanovllm.engine.intake import Intake
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

POOLINGS = ("last", "mean")


def make_pooling_seq(
    intake: Intake, request_id: str, token_ids: list[int], pooling: str, *, arrival: int, priority: int
) -> Sequence:
    """Refuses a prompt that is empty or too long."""
    if pooling not in POOLINGS:
        raise RequestError(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
    params = SamplingParams()
    intake.check_tokens(token_ids, params)
    longest = intake.max_pooled_tokens
    if not 0 < len(token_ids) <= longest:
        raise RequestError(f"the input has {len(token_ids)} tokens: at least 1 and at most {longest} can be embedded")
    return Sequence(
        request_id,
        token_ids,
        params,
        max_num_tokens=len(token_ids),
        priority=priority,
        arrival=arrival,
        pooling=pooling,
    )
