"""Checks a prompt that is a mapping: text or token ids, and a cache salt."""

from collections.abc import Mapping
from typing import Any

from nanovllm.errors import RequestError


def check_mapping(prompt: Mapping[str, Any]) -> None:
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        raise RequestError(
            f"a prompt has the unknown keys {', '.join(sorted(map(repr, unknown)))}; known keys are 'prompt' or "
            "'prompt_token_ids', and 'cache_salt'"
        )
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt={salt!r}: must be a string")
