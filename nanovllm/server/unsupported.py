"""Fields of other servers' APIs that this server does not implement. They are refused by name.

Each table maps a field to the values that are accepted all the same, because they ask for nothing. Null always is.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.server.errors import refuse
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)

NeutralValues = Mapping[str, tuple[Any, ...]]

OF_VLLM: NeutralValues = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "repetition_detection": (),
    "return_token_offsets": (False,),
    "return_assistant_tokens_mask": (False,),
    "routed_experts_prompt_start": (0,),
}
OF_LLAMA_CPP: NeutralValues = {
    "n_predict": (),
    "n_keep": (0,),
    "n_indent": (0,),
    "n_cmpl": (1,),
    "n_probs": (0,),
    "min_keep": (0,),
    "dynatemp_range": (0,),
    "typical_p": (1,),
    "repeat_penalty": (1,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "mirostat": (0,),
    "samplers": (),
    "lora": ([],),
    "t_max_predict_ms": (0,),
    "post_sampling_probs": (False,),
    "return_tokens": (False,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "response_fields": ([],),
}
OF_SGLANG: NeutralValues = {
    "regex": (),
    "ebnf": (),
    "stop_regex": ([],),
    "lora_path": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}
OF_OPENAI: NeutralValues = {"store": (False,), "service_tier": ("auto", "default")}
# Labels for the operator and hints for a cache. No value of theirs changes a response.
WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "safety_identifier", "session_id"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_prompt", "id_slot"),
    }
)
MAX_NAMES_LOGGED, MAX_NAME_CHARS = 8, 64


def check_unsupported_fields(request: Mapping[str, Any], unsupported: NeutralValues) -> None:
    """Raise an ApiError if the request uses an unsupported field."""
    for name in unsupported.keys() & request.keys():
        if request[name] is not None and request[name] not in unsupported[name]:
            accepted = ", ".join(str(value).lower() for value in unsupported[name])
            raise refuse(
                name, "is not supported by this server" + (f"; only {accepted} is accepted" if accepted else "")
            )


def log_unknown_fields(request: Mapping[str, Any], known: tuple[str, ...], unsupported: NeutralValues) -> None:
    """Log the fields that no API known here has. They are ignored, because clients send fields of many servers."""
    unknown = [
        name
        for name in request
        if name not in known and name not in unsupported and name not in WITHOUT_EFFECT and request[name] is not None
    ]
    if unknown:
        shown = ", ".join(repr(name[:MAX_NAME_CHARS]) for name in unknown[:MAX_NAMES_LOGGED])
        logger.warning("a request has %d unknown fields, which are ignored: %s", len(unknown), shown)
