"""Checks of a request's parameters: each raises a ValueError that names the parameter, its value and the rule."""

import math
import sys
from collections.abc import Sequence

MAX_VALUE_CHARS = 1000  # an error message shows at most this much of a value


def refuse(field: str, value: object, rule: str) -> None:
    text = repr(value)
    raise ValueError(f"{field}={text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + '...'}: {rule}")


def check_int(field: str, value: object, low: int, high: int | None = None) -> None:
    upper = "" if high is None else f" and at most {high}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        refuse(field, value, f"must be an integer of at least {low}{upper}")


def check_float(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not number or not (low < value if open_low else low <= value) or value > high:  # type: ignore[operator]
        span = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        refuse(field, value, f"must be a finite number in {span}")


def check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse(field, value, "must be True or False")


def strings(field: str, value: object) -> tuple[str, ...]:
    """A tuple of non-empty strings, from None, one string or a list of strings."""
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
    if value is None:
        return ()
    if items is None or not all(isinstance(item, str) and item for item in items):
        refuse(field, value, "must be a non-empty string or a list of them")
    return items  # type: ignore[return-value]


def token_ids(field: str, value: object) -> tuple[int, ...]:
    """A tuple of token ids, from None or a list."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (None,)
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        refuse(field, value, "must be a list of token ids (integers of at least 0)")
    return ids
