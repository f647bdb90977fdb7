"""Embeddings: requests that end with one vector for their prompt."""

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

POOLINGS = ("last", "mean")


class Embeddings:
    """Requests for embeddings, which run in an engine's steps beside its other requests."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._requests: dict[str, Request] = {}  # until their vectors are taken

    def add(
        self, token_ids: list[int], pooling: str = "last", *, request_id: str | None = None, priority: int = 0
    ) -> str:
        """Queue a text to be embedded and return the request's id, with which `take` returns the vector.

        The vector is the hidden state of the last token ("last") or the mean of all ("mean"), at unit length.
        """
        engine = self._engine
        engine.check_open()
        request_id, arrival = engine.new_id(request_id)
        if pooling not in POOLINGS:
            raise RequestError(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
        params = SamplingParams()
        engine.intake.check_tokens(token_ids, params)
        longest = engine.scheduler.config.max_cached_tokens
        if not 0 < len(token_ids) <= longest:
            raise RequestError(
                f"the input has {len(token_ids)} tokens: at least 1 and at most {longest} can be embedded"
            )
        seq = Sequence(
            request_id,
            token_ids,
            params,
            max_num_tokens=len(token_ids),
            priority=priority,
            arrival=arrival,
            pooling=pooling,
        )
        request = Request(request_id, None, [seq], params, None, stream=False)
        engine.queue(request)
        self._requests[request_id] = request
        return request_id

    def take(self, request_id: str) -> list[float] | None:
        """Return a finished embedding, once; None while it is not finished."""
        request = self._requests.get(request_id)
        if request is None or not request.finished:
            return None
        del self._requests[request_id]
        return request.seqs[0].pooled


def embed(engine: LLMEngine, token_ids: list[int], pooling: str) -> list[float]:
    """Run steps until this text is embedded."""
    embeddings = Embeddings(engine)
    name = embeddings.add(token_ids, pooling)
    try:
        while (vector := embeddings.take(name)) is None:
            engine.step(())
    finally:
        engine.abort(name)  # what is left after an error or Ctrl-C
    return vector
