"""Results returned to users. `out["text"]` and vLLM's `out.outputs[0].text` are the same text."""

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability in the model's distribution, before penalties and temperature."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt; while it is being generated, the part generated so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for EOS

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps of a request, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request with its completions. `out["text"]` and `out["token_ids"]` are those of the first completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def __getitem__(self, key: str) -> Any:
        if key in ("text", "token_ids"):
            return getattr(self.outputs[0], key)
        raise KeyError(
            f"{key!r}: the keys are 'text' and 'token_ids'; everything else is an attribute of RequestOutput"
        )
