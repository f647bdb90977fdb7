"""How the benchmarks' own arguments are read."""

import argparse


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
