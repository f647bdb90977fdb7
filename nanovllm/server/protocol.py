"""The requests of the OpenAI API, with vLLM's extras: what is understood, and what is refused by name.

A field that stands here is honoured. One of `REFUSED` asks for something that is not done, and passes only with a value
that changes nothing; so does null, always. Any other field is unknown and passes.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from nanovllm.server.errors import ApiError, refuse

Kind = TypeVar("Kind", bound=msgspec.Struct)
NAMED = re.compile(r"(?:\$\.|required field `)(\w+)")  # the field in msgspec's messages
# Bounds of what can be told to the engine; whether a number makes sense is said elsewhere.
Int = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Neutral = Mapping[str, tuple[Any, ...]]  # field -> the values that ask for nothing


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    input: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Int | None = None
    pooling: str | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


_OF_VLLM: Neutral = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
}
_OF_OPENAI: Neutral = {"store": (False,), "service_tier": ("auto", "default")}
REFUSED: dict[type, Neutral] = {
    ChatRequest: {
        **_OF_VLLM,
        **_OF_OPENAI,
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none",),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "echo": (False,),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
    },
    CompletionRequest: {**_OF_VLLM, "suffix": ("",)},
    EmbeddingRequest: {"truncate_prompt_tokens": ()},
    TokenizeRequest: {"chat_template": ()},
    DetokenizeRequest: {},
}


def understand(request: dict[str, Any], kind: type[Kind]) -> Kind:
    """The request as `kind`, or an error that names the field."""
    refuse_asked_for(request, REFUSED.get(kind, {}))
    try:
        return msgspec.convert(request, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        rule = str(error).partition(" - at ")[0]
        named = NAMED.search(str(error))
        param = None if named is None else named[1]
        raise ApiError(400, f"{param}: {rule}" if param else rule, param=param) from None


def refuse_asked_for(request: Mapping[str, Any], refused: Neutral) -> None:
    for name in refused.keys() & request.keys():
        if request[name] is not None and request[name] not in refused[name]:
            passes = ", ".join(str(value).lower() for value in refused[name])
            raise refuse(name, "this server does not do that" + (f"; only {passes} passes" if passes else ""))
