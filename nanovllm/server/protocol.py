"""The request types of the OpenAI API with vLLM's extensions, and the fields that are refused.

Fields declared here are supported. A field in `unsupported` requests something that is not implemented: it is refused
unless its value is null or one that changes nothing. All other fields are unknown: they are logged and ignored.
"""

import re
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from nanovllm.server.errors import ApiError
from nanovllm.server.unsupported import (
    OF_LLAMA_CPP,
    OF_OPENAI,
    OF_SGLANG,
    OF_VLLM,
    NeutralValues,
    check_unsupported_fields,
    log_unknown_fields,
)

Kind = TypeVar("Kind", bound="ApiRequest")
FIELD_IN_ERROR = re.compile(r"(?:\$\.|required field `)(\w+)")  # the field's name in msgspec's error messages
# Ranges that can be sent to the engine. SamplingParams and the engine check whether a value makes sense.
Int = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class ApiRequest(msgspec.Struct, kw_only=True):
    """The body of a request. `unsupported`: fields that are known but not implemented."""

    unsupported: ClassVar[NeutralValues] = {}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(ApiRequest, kw_only=True):
    """The fields that /v1/chat/completions and /v1/completions share."""

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
    logprob_token_ids: list[TokenId] | None = None
    thinking_token_budget: Int | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    stream_interval: Int | None = None
    request_id: str | None = None
    grammar: str | None = None  # of llama.cpp, as json_schema
    json_schema: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[NeutralValues] = {
        **OF_VLLM,
        **OF_LLAMA_CPP,
        **OF_SGLANG,
        **OF_OPENAI,
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none",),
        "verbosity": ("medium",),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    unsupported: ClassVar[NeutralValues] = {**OF_VLLM, **OF_LLAMA_CPP, **OF_SGLANG, "suffix": ("",)}

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None


class EmbeddingRequest(ApiRequest, kw_only=True):
    unsupported: ClassVar[NeutralValues] = {
        "messages": (),
        "add_generation_prompt": (False,),
        "continue_final_message": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "use_activation": (True,),
        "priority": (0,),
        "cache_salt": (),
    }

    input: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Int | None = None
    pooling: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    request_id: str | None = None


class TokenizeRequest(ApiRequest, kw_only=True):
    unsupported: ClassVar[NeutralValues] = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiRequest, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


def parse_request(request: dict[str, Any], kind: type[Kind]) -> Kind:
    """Convert a JSON object to the request type `kind`, or raise an ApiError that names the invalid field."""
    check_unsupported_fields(request, kind.unsupported)
    log_unknown_fields(request, kind.__struct_fields__, kind.unsupported)
    try:
        return msgspec.convert(request, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        rule = str(error).partition(" - at ")[0]
        found = FIELD_IN_ERROR.search(str(error))
        param = None if found is None else found[1]
        if param == "logit_bias":
            rule = _invalid_bias(request["logit_bias"]) or rule
        raise ApiError(400, f"{param}: {rule}" if param else rule, param=param) from None


def _invalid_bias(bias: Any) -> str | None:
    """What is wrong with the first invalid entry of `logit_bias`, whose key msgspec does not name."""
    for key, value in bias.items() if isinstance(bias, dict) else ():
        if not (key.isascii() and key.isdigit() and int(key) < 2**31):
            return f"the key {key!r} is not a token id"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"the value of the key {key!r} is not a number"
    return None
