"""Argument types for argparse: numbers within bounds, ranges, JSON."""

import argparse
import json
import math
from typing import Any


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Integers of at least 1, separated by commas."""
    return [count(part) for part in text.split(",")]


def span(text: str) -> tuple[int, int]:
    """The lowest and the highest value: '64:256', or '128' for both."""
    low, colon, high = text.partition(":")
    ends = count(low), count(high if colon else low)
    if ends[0] > ends[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first number must not exceed the second")
    return ends


def whole_number(text: str) -> int:
    """An integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 0")
    return int(text)


def number(text: str) -> float:
    """Any number, also inf and nan."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive(text: str) -> float:
    """A number above 0, also inf."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def positive_finite(text: str) -> float:
    """A number above 0, without inf."""
    value = positive(text)
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number above 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object as a dictionary."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; write '{{\"name\": value}}'")
    return value
