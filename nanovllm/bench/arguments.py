"""How arguments of a command are read that are more than a word: numbers within bounds, spans, JSON."""

import argparse
import json
import math
from typing import Any


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def span(text: str) -> tuple[int, int]:
    """'64:256', or '128' for exactly that."""
    low, colon, high = text.partition(":")
    ends = count(low), count(high if colon else low)
    if ends[0] > ends[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first number must not exceed the second")
    return ends


def whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 0")
    return int(text)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def positive(text: str) -> float:
    """Also inf."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def positive_finite(text: str) -> float:
    value = positive(text)
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number above 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; write '{{\"name\": value}}'")
    return value
