"""Sampling parameters that are lists or mappings: checked, and copied so that nobody can change them later."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.option import integer, number, refuse

TOKEN, BIAS = integer(0), number(-100, 100)
MAX_REPORTED_TOKENS = 100


def checked_list(name: str, value: Any) -> Any:
    """The value of the parameter `name` as it is stored: a tuple or a dict."""
    if name == "logit_bias":
        return token_biases(name, value)
    if name in ("stop", "bad_words"):
        return strings(name, value)
    if name == "stop_token_ids":
        return token_ids(name, value)
    if name == "logprob_token_ids":
        reported = tuple(dict.fromkeys(token_ids(name, value)))
        if len(reported) > MAX_REPORTED_TOKENS:
            refuse(name, len(reported), f"must name at most {MAX_REPORTED_TOKENS} tokens")
        return reported
    allowed = token_ids(name, value)
    if not allowed:
        refuse(name, allowed, "must name at least one token, or be None to allow all")
    return allowed


def strings(field: str, value: object) -> tuple[str, ...]:
    """A tuple of non-empty strings, from one string or a list of strings."""
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
    if items is None or not all(isinstance(item, str) and item for item in items):
        refuse(field, value, "must be a non-empty string or a list of them")
    return items  # type: ignore[return-value]


def token_ids(field: str, value: object) -> tuple[int, ...]:
    """A tuple of token ids, from a list."""
    ids = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (None,)
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        refuse(field, value, "must be a list of token ids (integers of at least 0)")
    return ids


def token_biases(field: str, value: Any) -> dict[int, float]:
    """A dict from token ids to what is added to their logits."""
    if not isinstance(value, Mapping):
        refuse(field, value, "must map token ids to numbers in [-100, 100]")
    for token, bias in value.items():
        for name, checked, rule in ((f"{field} token", token, TOKEN), (f"{field}[{token}]", bias, BIAS)):
            if (broken := rule(checked)) is not None:
                refuse(name, checked, broken)
    return dict(value)
