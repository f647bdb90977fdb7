"""From a request's fields to `SamplingParams`, within the server's limits."""

from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import bad_request, refuse
from nanovllm.server.protocol import GenerationRequest
from nanovllm.server.settings import ServerSettings

MAX_STOP_CHARS = 1024
# Fields of the same name and meaning on both sides; null means the default.
SHARED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "prompt_logprobs"),
)


def sampling_fields(request: GenerationRequest, settings: ServerSettings) -> dict[str, Any]:
    """Those fields of `SamplingParams` whose name and default are the same in all APIs."""
    check_limits(request, settings)
    return {name: value for name in SHARED if (value := getattr(request, name)) is not None}


def make_params(**fields: Any) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise bad_request(error) from None


def check_limits(request: GenerationRequest, settings: ServerSettings) -> None:
    check_stop(request.stop, settings)
    if request.logit_bias and len(request.logit_bias) > settings.max_logit_bias:
        raise refuse("logit_bias", f"{len(request.logit_bias)} entries; at most {settings.max_logit_bias} are taken")
    for name in ("stop_token_ids", "bad_words"):
        if len(getattr(request, name) or ()) > settings.max_logit_bias:
            raise refuse(name, f"at most {settings.max_logit_bias} entries are taken")
    if request.stream_options is not None:
        if not request.stream:
            raise refuse("stream_options", "needs stream: true")
        if request.stream_options.include_obfuscation:
            raise refuse("stream_options", "include_obfuscation is not done by this server")
    if request.prompt_logprobs is not None and request.stream:
        raise refuse("prompt_logprobs", "is not given in a stream; set stream to false")


def check_stop(stop: str | list[str] | None, settings: ServerSettings, name: str = "stop") -> None:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > settings.max_stop_strings:
        raise refuse(name, f"{len(strings)} strings; at most {settings.max_stop_strings} are taken")
    if any(len(string) > MAX_STOP_CHARS for string in strings):
        raise refuse(name, f"a string of more than {MAX_STOP_CHARS} characters is not taken")
