"""Prompts in all the forms that callers give them: text, token ids, or either with a salt; one or many."""

import struct
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from operator import countOf
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.text.tokenizer import Tokenizer

Prompt = str | Seq[int] | Mapping[str, Any]


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int], str | None]:
    """Text (if any), token ids and cache salt of a prompt in any of its forms."""
    salt = None
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            raise RequestError(
                f"a prompt has {', '.join(sorted(map(repr, unknown)))}; known: 'prompt' or 'prompt_token_ids', "
                "'cache_salt'"
            )
        salt = prompt.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"cache_salt={salt!r}: must be a string")
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _ids(prompt["prompt_token_ids"]), salt
        prompt = prompt.get("prompt")  # type: ignore[assignment]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("skip_tokenizer_init=True: give prompt_token_ids instead of text")
        return prompt, tokenizer.encode(prompt), salt
    return None, _ids(prompt), salt


def _ids(prompt: Any) -> list[int]:
    ids = list(prompt) if isinstance(prompt, Seq) and not isinstance(prompt, str | bytes) else None
    if ids is None or countOf(map(type, ids), int) < len(ids):
        raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    return ids


def all_below(limit: int, ids: Collection[int]) -> bool:
    """Whether all are in [0, limit): in half the time that Python's min and max take for the ids of a long prompt."""
    import numpy as np

    try:
        packed = struct.pack(f"{len(ids)}I", *ids)
    except struct.error:  # negative, or far too large
        return False
    return bool(np.frombuffer(packed, dtype=np.uint32).max() < limit)


def as_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts."""
    single = isinstance(prompts, str | Mapping)
    if isinstance(prompts, Seq) and not single and len(prompts) and isinstance(prompts[0], int):
        single = True
    if single:
        return [prompts]
    if not isinstance(prompts, Seq):
        raise RequestError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
    return list(prompts)


def one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """What is said once for all prompts or once for each, as one for each."""
    if isinstance(value, kind):
        return [value] * count
    values = list(value) if isinstance(value, Seq) else []
    if len(values) != count or not all(isinstance(item, kind) for item in values):
        raise RequestError(f"{name}: give one {kind.__name__} for all prompts, or one for each of the {count}")
    return values
