"""Read prompts in all accepted forms: text, token ids, or a mapping with either and a cache salt; one or several."""

import struct
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from operator import countOf
from typing import TYPE_CHECKING, Any

from nanovllm.errors import RequestError

if TYPE_CHECKING:
    from nanovllm.text.tokenizer import Tokenizer

Prompt = str | Seq[int] | Mapping[str, Any]


def read_prompt(prompt: Prompt, tokenizer: "Tokenizer | None") -> tuple[str | None, list[int], str | None]:
    """Return (text or None, token ids, cache salt or None) of a prompt in any accepted form."""
    salt = None
    if isinstance(prompt, Mapping):
        from nanovllm.text.prompt_mapping import check_mapping

        check_mapping(prompt)
        salt = prompt.get("cache_salt")
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _ids(prompt["prompt_token_ids"]), salt
        prompt = prompt.get("prompt")  # type: ignore[assignment]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("skip_tokenizer_init=True: there is no tokenizer; give prompt_token_ids instead of text")
        return prompt, tokenizer.encode(prompt), salt
    return None, _ids(prompt), salt


def _ids(prompt: Any) -> list[int]:
    ids = list(prompt) if isinstance(prompt, Seq) and not isinstance(prompt, str | bytes) else None
    if ids is None or countOf(map(type, ids), int) < len(ids):
        raise RequestError(f"a prompt must be text or a list of token ids, not {type(prompt).__name__}")
    return ids


def all_below(limit: int, ids: Collection[int]) -> bool:
    """True if all ids are in [0, limit). For a long prompt this takes half the time of Python's min and max."""
    import numpy as np

    try:
        packed = struct.pack(f"{len(ids)}I", *ids)
    except struct.error:  # negative, or larger than 32 bits
        return False
    return bool(np.frombuffer(packed, dtype=np.uint32).max() < limit)


def as_list(prompts: Any) -> list[Any]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise RequestError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
    is_one = len(prompts) > 0 and isinstance(prompts[0], int)  # its token ids
    return [prompts] if is_one else list(prompts)


def one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """A list of `count` values, one per prompt, from an argument `name` that is one value for all or a list of them."""
    if isinstance(value, kind):
        return [value] * count
    values = list(value) if isinstance(value, Seq) else []
    if len(values) != count or not all(isinstance(item, kind) for item in values):
        raise RequestError(f"{name}: give one {kind.__name__} for all prompts, or one for each of the {count}")
    return values
