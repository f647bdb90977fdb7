"""Convert a request's fields to `SamplingParams`, and check the server's limits."""

from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import bad_request, refuse
from nanovllm.server.protocol import GenerationRequest
from nanovllm.server.settings import ServerSettings
from nanovllm.server.truncation import Truncation, read_truncation

MAX_STOP_CHARS = 1024
# Fields with the same name and meaning in requests and in SamplingParams; null means the default.
SHARED_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "prompt_logprobs", "thinking_token_budget"),
    "logprob_token_ids",
)


def sampling_fields(request: GenerationRequest, settings: ServerSettings) -> dict[str, Any]:
    """The arguments of `SamplingParams` that the request sets and that have the same name and default in all APIs."""
    check_limits(request, settings)
    return {name: value for name in SHARED_FIELDS if (value := getattr(request, name)) is not None}


def make_params(**fields: Any) -> SamplingParams:
    """Make SamplingParams; an invalid value raises an ApiError that names the field."""
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise bad_request(error) from None


def check_limits(request: GenerationRequest, settings: ServerSettings) -> None:
    """Raise an ApiError if the request exceeds a limit of the server, or combines fields that exclude each other."""
    check_stop(request.stop, settings)
    if request.logit_bias and len(request.logit_bias) > settings.max_logit_bias:
        raise refuse("logit_bias", f"{len(request.logit_bias)} entries; at most {settings.max_logit_bias} are accepted")
    for name in ("stop_token_ids", "bad_words"):
        num_entries = len(getattr(request, name) or ())
        if num_entries > settings.max_logit_bias:
            raise refuse(name, f"{num_entries} entries; at most {settings.max_logit_bias} are accepted")
    if request.stream_options is not None:
        if not request.stream:
            raise refuse("stream_options", "needs stream: true; set it, or leave stream_options out")
        if request.stream_options.include_obfuscation:
            raise refuse("stream_options", "include_obfuscation is not supported; leave it out")
    if request.stream_interval is not None and request.stream_interval < 1:
        raise refuse("stream_interval", "must be at least 1")
    if request.prompt_logprobs is not None and request.stream:
        raise refuse("prompt_logprobs", "cannot be streamed; set stream to false")


def prompt_truncation(request: GenerationRequest, max_model_len: int, max_tokens: int | None) -> Truncation | None:
    """How the request's prompts are truncated. -1 leaves room for the completion's maximum number of tokens."""
    return read_truncation(
        request.truncate_prompt_tokens,
        request.truncation_side,
        default_side="left",
        room=max_model_len - (max_tokens or 1),
    )


def check_stop(stop: str | list[str] | None, settings: ServerSettings, name: str = "stop") -> None:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > settings.max_stop_strings:
        raise refuse(name, f"{len(strings)} strings; at most {settings.max_stop_strings} are accepted")
    if any(len(string) > MAX_STOP_CHARS for string in strings):
        raise refuse(name, f"a string may have at most {MAX_STOP_CHARS} characters")
